#!/usr/bin/env bash
# Several hosts on this machine: run a command where network, processes, mounts and host name are its own. The hosts are
# network namespaces on a switch, with names in /etc/hosts; the command itself runs on the switch.
#
#     tests/net/hosts.sh NAME[,NAME ...] COMMAND [ARGUMENT ...]
#     tests/net/hosts.sh --on NAME COMMAND [ARGUMENT ...]          on one of the hosts, below the first form
#
# All of it ends with the command, also if it is killed: no interface, rule or process of the machine is touched.
# Needs root, ip, iptables and unshare (Debian: iproute2, iptables, util-linux); without them it says so, and status is 0.
set -euo pipefail

export PATH="$PATH:/usr/sbin:/sbin"
readonly OWN=(unshare --net --pid --mount --uts --fork --kill-child --mount-proc) SUBNET=10.0.0

skip() {
    printf 'skipped: %s\n' "$*"
    exit 0
}

# The switch has the subnet's last address.
make_hosts() { # NAME...
    local number=0 name
    ip link set lo up
    ip link add name switch type bridge
    ip address add "$SUBNET.254/24" dev switch
    ip link set switch up
    for name in "$@"; do
        ip netns add "$name"
        ip link add name "$name" type veth peer name eth0 netns "$name"
        ip link set dev "$name" master switch up
        ip -n "$name" address add "$SUBNET.$((++number))/24" dev eth0
        ip -n "$name" link set lo up
        ip -n "$name" link set eth0 up
        echo "$SUBNET.$number $name" >>/etc/hosts
    done
}

(($# > 1)) || { echo "error: no command. Fix: tests/net/hosts.sh NAME[,NAME ...] COMMAND [ARGUMENT ...]" >&2 && exit 2; }
if [[ $1 == --on ]]; then
    # shellcheck disable=SC2016  # expanded by the inner shell
    exec nsenter --net="/run/netns/$2" unshare --uts bash -c 'hostname "$0" && exec "$@"' "${@:2}"
fi
if [[ $1 != --inside ]]; then
    [[ $(id -u) == 0 ]] || skip "network namespaces need root"
    for program in ip iptables unshare nsenter; do
        command -v "$program" >/dev/null || skip "no $program; on Debian: apt-get install iproute2 iptables util-linux"
    done
    "${OWN[@]}" iptables -A INPUT -m string --algo bm --string x -m recent --name x --set 2>/dev/null ||
        skip "this kernel or container allows no namespaces, or has no iptables with the matches string and recent"
    exec "${OWN[@]}" -- "$0" --inside "$@"
fi
mount -t tmpfs tmpfs /run
mkdir /run/netns
cp /etc/hosts /run/hosts # one for all hosts
mount --bind /run/hosts /etc/hosts
IFS=, read -r -a names <<<"$2"
make_hosts "${names[@]}"
export OBLR_TEST_NET="$2"
status=0
"${@:3}" || status=$? # as a child: process 1 takes care of orphans
exit "$status"
