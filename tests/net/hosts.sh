#!/usr/bin/env bash
# Several hosts on this machine: run a command where network, processes, mounts and host name are its own. The command
# makes hosts there (hosts.py), as network namespaces on a switch.
#
#     tests/net/hosts.sh COMMAND [ARGUMENT ...]
#
# All of it ends with the command, also if it is killed: no interface, rule or process of the machine is touched.
# Needs root, ip, iptables and unshare (Debian: iproute2, iptables, util-linux); without them it says so, and status is 0.
set -euo pipefail

export PATH="$PATH:/usr/sbin:/sbin"
readonly OWN=(unshare --net --pid --mount --uts --fork --kill-child --mount-proc)

skip() {
    printf 'skipped: %s\n' "$*"
    exit 0
}

if [[ ${1-} != --inside ]]; then
    (($#)) || { echo "error: no command. Fix: tests/net/hosts.sh COMMAND [ARGUMENT ...]" >&2 && exit 2; }
    [[ $(id -u) == 0 ]] || skip "network namespaces need root"
    for program in ip iptables unshare nsenter; do
        command -v "$program" >/dev/null || skip "no $program; on Debian: apt-get install iproute2 iptables util-linux"
    done
    "${OWN[@]}" iptables -A INPUT -m string --algo bm --string x -m recent --name x --set 2>/dev/null ||
        skip "this kernel or container allows no namespaces, or has no iptables with the matches string and recent"
    exec "${OWN[@]}" -- "$0" --inside "$@"
fi
shift
mount -t tmpfs tmpfs /run
mkdir /run/netns
cp /etc/hosts /run/hosts # one for all hosts, which hosts.py completes
mount --bind /run/hosts /etc/hosts
ip link set lo up
export OBLR_TEST_NET=1
status=0
"$@" || status=$? # as a child: process 1 takes care of orphans
exit "$status"
