"""Whole runs on several hosts while the network fails: one or two trainers, two servers, and a service for rewards.

`make test-net` makes the hosts (tests/net/hosts.sh) and runs this file. Whatever the network does, a run ends as the
undisturbed one, or with status 1, one line that names whom it waited for, and a state from which it continues.
Not covered: NCCL, packets that are damaged or reordered, several machines' clocks and disks.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.replayed import certain, exported
from tests.e2e.api_server import KEY, ApiServer
from tests.e2e.conftest import ROOT
from tests.e2e.forked import CONFIG

if "OBLR_TEST_NET" not in os.environ:
    pytest.skip("needs hosts of its own: make test-net", allow_module_level=True)

from oblr_megatron.observe.trackers.feed import CLOSE_SECONDS
from tests.net.hosts import Cut, Host, How, left_behind

pytestmark = pytest.mark.timeout(1200)
STEPS, PORT = 5, 9000
MARK = "OBLR_TEST_NET_JOB"  # environment variable of all processes of a run
UNEQUAL = ("rollout/",)  # restarts, and last bits of log-probs that the servers' batches decide (docs/servers.md)
LIMIT_S = 400  # of an undisturbed run on a busy machine
TABLE = ROOT / "run/net/disturbances.md"
PARTS = ROOT / "run/net/disturbances"  # a file for each, until all are there
LATE_S = 60  # after its deadline, for the save and the end
ATTEMPT = "--- attempt\n"
PEER = re.compile(r"http://(server-\d|rewards)|trainer-\d|10\.0\.0\.\d|another rank|other ranks")
EVER = math.inf
Overrides = Callable[..., list[str]]


@dataclass
class Net:
    """The hosts, and what runs on them all the time."""

    directory: Path
    hosts: dict[str, Host]
    servers: list[ApiServer]
    overrides: Overrides
    jobs: list[Job] = field(default_factory=list)

    def job(self, directory: Path, ranks: int = 1, servers: int = 2, **keys: object) -> Job:
        """A run that has started."""
        names = [f"http://server-{number}:{self.servers[number].port}" for number in range(servers)]
        values = {
            "num_steps": STEPS,
            "rollout__servers": json.dumps(names),
            "rollout__importance_sampling": "none",  # so that the servers' last bits have no effect
            "reward__name": f"http://rewards:{PORT}/score",
            "evaluate__every_steps": 2,
            "evaluate__num_prompts": 4,
            "evaluate__max_response_tokens": 7,
            "checkpoint__every_steps": 1,
            "log__trackers": '["mlflow"]',
        }
        job = Job(self, directory, ranks, self.overrides(directory / "run", **values | keys))
        job.start()
        return job


@dataclass
class Job:
    """A run on the trainers' hosts: by `oblr-megatron train` on one, by a launcher on each of two."""

    net: Net
    directory: Path
    ranks: int
    arguments: list[str]
    launchers: list[subprocess.Popen[Any]] = field(default_factory=list)

    @property
    def run_dir(self) -> Path:
        return self.directory / "run"

    def start(self, *flags: str) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.launchers = []
        self.net.jobs.append(self)
        for rank in range(self.ranks):
            log = self.directory / f"out{rank}"
            with log.open("a") as file:
                file.write(ATTEMPT)
            self.launchers.append(self.popen(f"trainer-{rank}", log, *flags))

    def popen(self, host: str, log: Path, *flags: str) -> subprocess.Popen[Any]:
        """Its command on a host."""
        variables = {"OBLR_API_KEY": KEY, "MLFLOW_TRACKING_URI": f"http://tracker:{PORT}", MARK: str(self.directory)}
        words = ["-m", "oblr_megatron.cli", "train"]
        if self.ranks > 1:
            meeting = ["--rdzv-backend=c10d", "--rdzv-endpoint=trainer-0:29500", f"--rdzv-id={self.directory}"]
            words = ["-m", "oblr_megatron.runtime.launch", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=0"]
            words += [*meeting, "-m", "oblr_megatron.step_loop"]
        return self.net.hosts[host].popen([*words, CONFIG, *self.arguments, *flags], log, variables)

    def output(self) -> str:
        """Of all attempts, with the launchers' own logs."""
        return "".join((self.directory / f"out{rank}").read_text() for rank in range(self.ranks))

    def errors(self) -> list[list[str]]:
        """The lines of errors on each trainer's host, since the last start."""
        outputs = [(self.directory / f"out{rank}").read_text() for rank in range(self.ranks)]
        attempts = [text.rpartition(ATTEMPT)[2].splitlines() for text in outputs]
        return [[line for line in lines if line.startswith("error: ")] for lines in attempts]

    def steps(self) -> int:
        """Steps that are logged."""
        metrics = self.run_dir / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    def wait_for(self, condition: Callable[[], bool], seconds: float = LIMIT_S) -> None:
        """Poll until the condition holds; no launcher may end before."""
        end = time.monotonic() + seconds
        while not condition():
            assert all(one.poll() is None for one in self.launchers), self.output()[-3000:]
            assert time.monotonic() < end, self.output()[-3000:]
            time.sleep(0.02)

    def wait(self, seconds: float = LIMIT_S) -> set[int]:
        """The exit statuses of the launchers, all within so many seconds; no process may be left."""
        end = time.monotonic() + seconds
        try:
            found = {one.wait(max(0.1, end - time.monotonic())) for one in self.launchers}
        finally:
            self.kill()
        assert not (left := left_behind(f"{MARK}={self.directory}")), left
        return found

    def alive(self) -> bool:
        return any(one.poll() is None for one in self.launchers)

    def kill(self) -> None:
        for one in self.launchers:
            if one.poll() is None:
                os.killpg(one.pid, signal.SIGKILL)
                one.wait()


@pytest.fixture(scope="module")
def net(tiny: Path, overrides: Overrides, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Net]:
    directory = tmp_path_factory.mktemp("net")
    hosts = {name: Host(name) for name in os.environ["OBLR_TEST_NET"].split(",")}
    with ExitStack() as stack:
        for name in ("rewards", "tracker"):
            words = ["-m", "tests.net.service", hosts[name].address, str(PORT), str(directory), str(os.getpid())]
            serves = hosts[name].popen(words, directory / name, {})
            stack.callback(serves.wait)
            stack.callback(serves.kill)
        servers = []
        for number in range(2):
            log = directory / f"server-{number}"
            servers.append(ApiServer(tiny / "model", log, max_model_len=32, host=hosts[f"server-{number}"]))
            stack.callback(servers[-1].close)
        for server in servers:
            server.wait_ready()
        yield Net(directory, hosts, servers, overrides)


@pytest.fixture(autouse=True)
def no_job_is_left(net: Net) -> Iterator[None]:
    yield
    for job in net.jobs:
        job.kill()
    net.jobs.clear()


@pytest.fixture(scope="module")
def undisturbed(net: Net) -> Callable[[int], Path]:
    """The run directory of a run on so many trainers' hosts that nothing disturbs."""

    @cache
    def make(ranks: int) -> Path:
        job = net.job(net.directory / f"undisturbed-{ranks}", ranks)
        assert job.wait() == {0}, job.output()[-3000:]
        return job.run_dir

    return make


def assert_same(run_dir: Path, other: Path) -> None:
    """The same metrics and weights, bit for bit."""
    mine, theirs = (
        [{key: value for key, value in step.items() if not key.startswith(UNEQUAL)} for step in certain(path)]
        for path in (run_dir, other)
    )
    assert mine == theirs
    first, second = exported(run_dir), exported(other)
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in second)


@pytest.mark.parametrize("ranks", [1, 2])
def test_undisturbed_runs_are_equal(net: Net, undisturbed: Callable[[int], Path], tmp_path: Path, ranks: int) -> None:
    """One launcher more than nodes ends with a line, and changes nothing."""
    job = net.job(tmp_path, ranks, servers=1)
    if ranks > 1:
        job.wait_for(lambda: job.steps() > 0)
        said = tmp_path / "third"
        assert job.popen("rewards", said).wait(LIMIT_S) == 2
        assert "error: a node too many" in said.read_text() and "Traceback" not in said.read_text()
    assert job.wait() == {0}, job.output()[-3000:]
    assert_same(job.run_dir, undisturbed(ranks))


@dataclass(frozen=True)
class Trouble:
    """A disturbance of a host's network for so many seconds; see `Host.cut`."""

    moment: str
    how: How
    seconds: float
    ranks: int = 1
    servers: int = 1
    nth: int = 3

    def __str__(self) -> str:
        return f"{self.moment}, {self.how}, {self.seconds:g} s, {self.ranks} ranks, {self.servers} servers"


MOMENTS: dict[str, tuple[str, str, bool]] = {
    "generate": ("server-0", "POST /oblr/sample", False),
    "before a push": ("server-0", "POST /oblr/open_push", True),
    "within a push": ("server-0", "POST /oblr/update_push", False),
    "after a push": ("server-0", "POST /oblr/finish_push", False),  # its answer does not come
    "evaluate": ("server-0", '"max_tokens":7', False),
    "score": ("rewards", "POST /score", False),
    "track": ("tracker", "runs/log-batch", False),
    "a rank": ("trainer-1", "", False),
    "save": ("trainer-1", "", False),
}
"""Host, text of the packet that begins it, whether this packet is lost."""
SHORT = {"start": 10.0, "generate": 10.0, "push": 8.0, "distributed": 12.0}
LONG = {"start": 60.0, "generate": 60.0, "push": 45.0, "distributed": 90.0}
"""Deadlines in seconds that a disturbance for ever has, and one that heals."""


@dataclass
class Result:
    """What became of a disturbed run."""

    trouble: Trouble
    status: int
    seconds: float  # from the disturbance, or from its end, to the end of the run
    said: str = ""  # the line of the error

    def row(self) -> str:
        healed = "as undisturbed" if self.status == 0 else "status 1, resumed as undisturbed"
        return f"| {self.trouble} | {healed} | {self.seconds:.0f} s | {self.said[:160]} |"


def disturb(net: Net, trouble: Trouble, directory: Path, undisturbed: Path) -> Result:
    """A run with a disturbance. It ends as the undisturbed run, or in time with status 1, and its resume does."""
    deadlines = SHORT if trouble.seconds == EVER else LONG
    if trouble.how == "half-open":  # another connection takes over after 30 s
        deadlines = deadlines | {"generate": LONG["generate"]}
    keys: dict[str, object] = {f"rollout__{name}_timeout_s": deadlines[name] for name in ("start", "generate", "push")}
    keys |= {"parallel__distributed_timeout_s": deadlines["distributed"]}
    keys |= {"reward__timeout_s": 5 if trouble.seconds == EVER else 40, "reward__max_failed_steps": 1}
    name, text, before = MOMENTS[trouble.moment]
    with net.hosts[name].cut(trouble.how, text, trouble.nth, before=before) if text else nullcontext() as cut:
        job = net.job(directory, trouble.ranks, trouble.servers, **keys)
        if cut is not None:
            cut.wait(job.launchers[0], LIMIT_S)
            status, seconds = finish(job, cut, trouble, deadlines)
    if not text:
        saved = job.run_dir / "checkpoints"
        job.wait_for(lambda: any(saved.glob("step_*")))
        job.wait_for(lambda: trouble.moment != "save" or any(saved.glob(".step_*")))
        with net.hosts[name].cut(trouble.how) as cut:
            status, seconds = finish(job, cut, trouble, deadlines)
    if trouble.moment == "track":
        assert status == 0 and ("records were lost" in job.output()) >= (trouble.how == "drop"), job.output()[-3000:]
    if status == 0:
        assert_same(job.run_dir, undisturbed)
        return Result(trouble, 0, seconds)
    errors = job.errors()
    assert all(errors), job.output()[-3000:]
    assert any(PEER.search(line) for lines in errors for line in lines), errors
    assert "Traceback" not in job.output(), job.output()[-5000:]
    for server in net.servers:
        server.wait_ready()
    if not any(job.run_dir.glob("checkpoints/step_*")):
        (job.run_dir / "metrics.jsonl").unlink(missing_ok=True)  # as the refusal of a resume says
    job.start("--resume")
    assert job.wait() == {0}, job.output()[-3000:]
    assert_same(job.run_dir, undisturbed)
    return Result(trouble, 1, seconds, errors[0][-1])


def finish(job: Job, cut: Cut, trouble: Trouble, deadlines: dict[str, float]) -> tuple[int, float]:
    """Heal after the time of the disturbance, and wait for the end: (status, seconds that it took)."""
    end = time.monotonic() + trouble.seconds
    while trouble.seconds < EVER and time.monotonic() < end and job.alive():
        time.sleep(0.05)
    if trouble.seconds < EVER:
        cut.heal()
    begin = time.monotonic()
    statuses = job.wait(sum(deadlines.values()) + CLOSE_SECONDS * (trouble.moment == "track") + LATE_S)
    assert statuses in ({0}, {1}), (statuses, job.output()[-3000:])
    return max(statuses), time.monotonic() - begin


FEW = [
    Trouble("generate", "drop", 2),
    Trouble("generate", "reject", 2),
    Trouble("generate", "half-open", EVER, nth=4),
    Trouble("generate", "drop", EVER, servers=2),
    Trouble("generate", "drop", EVER),
    Trouble("generate", "unnamed", EVER),
    Trouble("before a push", "drop", 2),
    Trouble("within a push", "reject", 2, servers=2),
    Trouble("within a push", "unplug", 2),
    Trouble("after a push", "drop", EVER),
    Trouble("evaluate", "reject", 2),
    Trouble("score", "reject", 4),
    Trouble("score", "drop", EVER, nth=5),  # an evaluation's
    Trouble("track", "drop", EVER),
    Trouble("track", "slow", EVER),
    Trouble("a rank", "drop", 2, ranks=2),
    Trouble("save", "reject", 2, ranks=2),
    Trouble("a rank", "unplug", EVER, ranks=2),
]


def name_of(trouble: Trouble) -> str:
    words = trouble.moment, trouble.how, f"{trouble.seconds:g}", f"{trouble.ranks}x{trouble.servers}"
    return "-".join(words).replace(" ", "_")


@pytest.mark.parametrize("trouble", FEW, ids=name_of)
def test_a_disturbed_run_ends_as_the_undisturbed_one_or_in_time(
    net: Net, undisturbed: Callable[[int], Path], tmp_path: Path, trouble: Trouble
) -> None:
    print(disturb(net, trouble, tmp_path, undisturbed(trouble.ranks)).row())


def test_a_server_that_comes_back_with_older_weights_gets_the_newer_ones(
    net: Net, undisturbed: Callable[[int], Path], tmp_path: Path
) -> None:
    """It is away from its third push on, until the run has made one more step with the other server."""
    with net.hosts["server-0"].cut("drop", MOMENTS["before a push"][1], 3, before=True) as cut:
        job = net.job(tmp_path, servers=2, rollout__push_timeout_s=SHORT["push"])
        cut.wait(job.launchers[0], LIMIT_S)
        steps = job.steps() + 1
        job.wait_for(lambda: job.steps() >= steps)
        assert net.servers[0].info().holding.version < net.servers[1].info().holding.version
        cut.heal()
        assert job.wait() == {0}, job.output()[-3000:]
    assert_same(job.run_dir, undisturbed(1))
    assert sum(step.get("rollout/restarts", 0) for step in certain(job.run_dir)) == 1
    assert net.servers[0].info().holding == net.servers[1].info().holding


@pytest.mark.parametrize("name", ["trainer-0", "tracker", "server-0", "rewards"])
def test_a_name_that_is_known_late(net: Net, undisturbed: Callable[[int], Path], tmp_path: Path, name: str) -> None:
    """A trainer waits for the name of another one, a tracker holds nothing up, and without the others no run begins."""
    ranks = 1 + name.startswith("trainer")
    with net.hosts[name].cut("unnamed"):
        job = net.job(tmp_path, ranks)
        if name in ("trainer-0", "tracker"):
            time.sleep(6)
        else:
            assert job.wait() == {2}, job.output()[-3000:]
            ((error,),) = job.errors()
            assert name in error and "Fix: " in error
    if name not in ("trainer-0", "tracker"):
        job.start()
    assert job.wait() == {0}, job.output()[-3000:]
    assert_same(job.run_dir, undisturbed(ranks))


SEED, DISTURBANCES = 20261127, 60


def drawn(count: int) -> Iterator[Trouble]:
    """Random disturbances, the same in every run of this test."""
    draw = random.Random(SEED)
    for _ in range(count):
        moment = draw.choice([name for name in MOMENTS if name != "track"])
        ranks = 2 if MOMENTS[moment][0] == "trainer-1" else draw.choice((1, 1, 1, 2))
        half: How = "half-open" if MOMENTS[moment][1] else "drop"
        hows: tuple[How, ...] = ("drop", "drop", "reject", "unplug", half, "slow")
        how = draw.choice(hows)
        seconds = draw.choice((2, 2, 30, EVER, EVER)) if how != "half-open" else EVER
        yield Trouble(moment, how, seconds, ranks, draw.choice((1, 2)), nth=draw.randint(2, 5))


@contextmanager
def claimed(part: Path) -> Iterator[bool]:
    """Whether the disturbance of this file is ours: nobody has tried it, or is trying it."""
    with part.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with this process
        except BlockingIOError:
            yield False
        else:
            yield not passed(part)


def passed(part: Path) -> bool:
    """Whether a disturbance was tried on this source, with success."""
    text = part.read_text() if part.exists() else ""
    return bool(text) and json.loads(text)["source"] == source() and "FAILED" not in text


@cache
def source() -> str:
    """Names the package's source."""
    digest = hashlib.sha256()
    for file in sorted((ROOT / "oblr_megatron").rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


@pytest.mark.nightly
@pytest.mark.timeout(4 * 3600)
def test_random_disturbances(net: Net, undisturbed: Callable[[int], Path], tmp_path: Path) -> None:
    """All are tried, whatever becomes of one; TABLE has a line for each when all are.

    A stopped test goes on where it was, several at once share the work, and those that failed are tried again.
    """
    PARTS.mkdir(parents=True, exist_ok=True)
    parts = [PARTS / f"{number:02}" for number in range(DISTURBANCES)]
    if all(map(passed, parts)):  # an earlier test, from its first to its last one
        for part in parts:
            part.unlink()
    failed = []
    for number, trouble in enumerate(drawn(DISTURBANCES)):
        with claimed(parts[number]) as mine:
            if not mine:
                continue
            try:
                row = disturb(net, trouble, tmp_path / str(number), undisturbed(trouble.ranks)).row()
            except Exception as error:  # noqa: BLE001  the next one is tried
                failed.append(f"{number}: {trouble}: {error}")
                row = f"| {trouble} | FAILED | | {' '.join(str(error).split())[:300]} |"
            parts[number].write_text(json.dumps({"source": source(), "row": row}))
            print(number, row, flush=True)
    rows = [json.loads(part.read_text() or "{}").get("row", "") for part in parts]
    if all(rows):
        TABLE.write_text(
            "\n".join(["| disturbance | the run | ended after | its line |", "|---|---|---|---|", *rows, ""])
        )
    assert not failed, "\n".join(failed)
