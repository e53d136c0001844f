#!/usr/bin/env bash
# A real SLURM on this machine: one controller and two nodes with eight made-up GPUs each, so that the headers of
# slurm/*.sh are accepted. The nodes, node-0 and node-1, are hosts of tests/net/hosts.sh; the controller is on the switch.
#
#     tests/slurm/cluster.sh COMMAND [ARGUMENT ...]    run the command in this SLURM, then cancel its jobs and stop it
#     tests/slurm/cluster.sh bash                      sbatch, squeue, ... by hand
#
# Needs root, and network namespaces: without them it says so, and status is 0. On Debian it installs SLURM and MUNGE if
# they are missing. Files and logs are in a new directory under TMPDIR, which remains if something failed.
set -euo pipefail

readonly START_S=120 JOBS_END_S=300 DAEMON_END_S=60 NODES=(node-0 node-1)
HOSTS="$(dirname "${BASH_SOURCE[0]}")/../net/hosts.sh"
export PATH="$PATH:/usr/sbin:/sbin"

say() { printf 'slurm: %s\n' "$*"; }

die() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

# Whether this can work at all; `missing` programs can be installed.
check() {
    local program
    missing=()
    [[ $(id -u) == 0 ]] || die "SLURM's daemons need root. Fix: run this as root, in a container for example"
    for program in munged slurmctld slurmd sbatch; do command -v "$program" >/dev/null || missing+=("$program"); done
    ((${#missing[@]} == 0)) || command -v apt-get >/dev/null ||
        die "no ${missing[*]}, and no apt-get to install them. Fix: install SLURM and MUNGE"
}

install() {
    local log="${TMPDIR:-/tmp}/oblr_slurm_apt.log"
    ((${#missing[@]})) || return 0
    say "installing SLURM: ${missing[*]} not found"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        munge slurm-client slurmctld slurmd; } >"$log" 2>&1 ||
        die "apt-get could not install SLURM; see $log. Fix: install slurmctld, slurmd, slurm-client and munge"
    [[ ! -d /run/systemd/system ]] || systemctl disable --now --quiet munge slurmctld slurmd # only ours is to run
}

configure() {
    local node
    mkdir "$home/state"
    touch "$home"/gpu{0..7}
    (umask 077 && head -c 1024 /dev/urandom >"$home/munge.key")
    # cred_expire is also how long a requeued job waits; the default is 120 s. KillWait leaves a loaded machine time to
    # save. SlurmdTimeout passes until a silent node is down.
    cat >"$home/slurm.conf" <<CONF
ClusterName=oblr_test
SlurmctldHost=$(hostname -s)(10.0.0.254)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$home/munge.socket,cred_expire=20
StateSaveLocation=$home/state
SlurmdSpoolDir=$home/spool.%n
SlurmctldPidFile=$home/slurmctld.pid
SlurmdPidFile=$home/slurmd.%n.pid
SlurmctldLogFile=$home/slurmctld.log
SlurmdLogFile=$home/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,bf_interval=2
MessageTimeout=60
BatchStartTimeout=120
SlurmdTimeout=60
KillWait=180
MinJobAge=86400
NodeName=DEFAULT CPUs=8 RealMemory=16000 Gres=gpu:8
$(for node in "${NODES[@]}"; do echo "NodeName=$node"; done)
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
    printf 'Name=gpu File=%s/gpu[0-7]\n' "$home" >"$home/gres.conf"
}

start() {
    munged --force --key-file="$home/munge.key" --socket="$home/munge.socket" --pid-file="$home/munged.pid" \
        --log-file="$home/munged.log" --seed-file="$home/munged.seed"
    slurmctld
    local waited node
    for node in "${NODES[@]}"; do "$HOSTS" --on "$node" slurmd; done
    for ((waited = 0; waited < START_S; waited++)); do
        [[ $(sinfo --noheader --format='%D %t' 2>/dev/null) != "2 idle" ]] || return 0
        sleep 1
    done
    tail -n 5 "$home"/*.log >&2
    die "SLURM did not start within $START_S s; its logs are in $home"
}

# Cancel all jobs, wait for their processes, end the daemons by their process ids.
stop() {
    local status=$? waited file
    trap - EXIT
    if [[ -s $home/slurmctld.pid ]]; then
        scancel --user="$(id -un)" || true
        for ((waited = 0; waited < JOBS_END_S; waited++)); do
            [[ -n $(squeue --noheader 2>&1) ]] || break
            sleep 1
        done
    fi
    for file in "$home"/slurmd.*.pid "$home/slurmctld.pid" "$home/munged.pid"; do end "$file"; done
    if ((status == 0)); then rm -rf "$home"; else say "status $status; SLURM's files remain in $home"; fi
    exit "$status"
}

end() { # PID_FILE
    local pid waited
    [[ -s $1 ]] || return 0
    pid="$(<"$1")"
    kill -TERM "$pid" 2>/dev/null || return 0
    for ((waited = 0; waited < DAEMON_END_S; waited++)); do
        kill -0 "$pid" 2>/dev/null || return 0
        sleep 1
    done
    kill -KILL "$pid" 2>/dev/null || true
}

(($#)) || die "no command. Fix: tests/slurm/cluster.sh COMMAND [ARGUMENT ...]"
if [[ $1 != --inside ]]; then
    check
    install # before, because the hosts have no way out
    exec "$HOSTS" "$(IFS=, && echo "${NODES[*]}")" "$0" --inside "$@"
fi
home="$(mktemp -d "${TMPDIR:-/tmp}/oblr_slurm.XXXXXX")" # short, because a socket's path has 107 characters at most
trap stop EXIT
configure
export SLURM_CONF="$home/slurm.conf" OBLR_TEST_SLURM="$home"
start
say "$(slurmctld -V), 2 nodes, SLURM_CONF=$SLURM_CONF"
"${@:2}"
