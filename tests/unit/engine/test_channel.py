"""Messages over a real socket pair: round trip, deadlines, death of the peer.

Not covered: the processes at its ends (tests/e2e/test_rollout_failures.py).
"""

import fcntl
import os
import resource
import socket
import threading
import time

import pytest

from oblr_megatron.engine.channel import Call, Channel, PeerGone, Reply


@pytest.fixture
def ends():
    pair = [Channel(sock) for sock in socket.socketpair()]
    yield pair
    for end in pair:
        end.close()


def test_messages_arrive_whole_and_in_order(ends):
    left, right = ends
    large = Call("generate", {"prompts": [tuple(range(1000))] * 400})  # far larger than the socket's buffer
    writer = threading.Thread(target=lambda: [left.send(message) for message in (large, Reply(value=3))])
    writer.start()
    assert right.receive() == large
    assert right.receive(time.monotonic() + 5) == Reply(value=3)
    writer.join()


def test_a_receiver_gives_up_at_its_deadline(ends):
    begin, asked = time.monotonic(), []
    with pytest.raises(TimeoutError):
        ends[0].receive(begin + 0.3, alive=lambda: asked.append("alive?") is None)
    assert time.monotonic() - begin >= 0.3
    assert 1 <= len(asked) <= 3, "every 0.2 s, and no more after the deadline"


def test_an_answer_that_came_in_time_is_read_after_the_deadline(ends):
    """An engine that was ready before the trainer asked is not late."""
    ends[1].send(Reply(value="ready"))
    assert ends[0].receive(time.monotonic() - 100, alive=lambda: True) == Reply(value="ready")


def test_a_sender_gives_up_when_nobody_reads(ends):
    with pytest.raises(TimeoutError):
        ends[0].send(bytes(2**24), time.monotonic() + 0.3)


def test_a_deadline_leaves_the_mode_that_duplicates_share():
    """A mode of its own for each deadline ended, now and then, the wait of another thread that has none."""
    left, right = socket.socketpair()
    with left, right:
        Channel(left).send(1, time.monotonic() + 5)
        with pytest.raises(TimeoutError):
            Channel(left).receive(time.monotonic())
        assert os.get_blocking(left.fileno())


def test_a_socket_with_a_high_number_is_ready(ends):
    """A rank with many gloo groups has more than 1024 descriptors."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, limits[1]), limits[1]))
    left, right = socket.socketpair()
    with left, socket.socket(fileno=fcntl.fcntl(right.detach(), fcntl.F_DUPFD, 1100)) as high:
        assert not Channel(high).ready()
        left.sendall(b"\0")
        assert Channel(high).ready()
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_half_a_message_is_no_message():
    left, right = socket.socketpair()
    left.sendall(b"\0" * 7 + b"\x09" + b"four")
    with right, pytest.raises(TimeoutError):
        Channel(right).receive(time.monotonic() + 0.3)
    left.close()


def test_a_closed_peer_is_noticed_on_both_paths(ends):
    left, right = ends
    right.close()
    with pytest.raises(PeerGone):
        left.receive()
    with pytest.raises(PeerGone):
        left.send(Reply())


def test_a_dead_peer_is_noticed_although_its_socket_is_open(ends):
    asked = []
    with pytest.raises(PeerGone, match="not alive"):
        ends[0].receive(alive=lambda: asked.append("alive?") is not None)
    assert len(asked) == 1, "at the first look, after 0.2 s"
