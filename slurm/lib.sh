# shellcheck shell=bash
# Functions of the job scripts. A script sets OBLR_CONFIG and calls oblr_run "$@"; see docs/cluster.md.
#
# Settings, from the environment of sbatch or of the script:
#   OBLR_HOME             the repository; by default the directory where sbatch was called
#   OBLR_CONFIG           TOML file, relative to OBLR_HOME; by default the script's own
#   OBLR_CONTAINER        image for pyxis (srun --container-image); OBLR_CONTAINER_MOUNTS adds SRC:DST[,SRC:DST...]
#   OBLR_VENV             virtual environment, used without a container; by default OBLR_PYTHON, the active one, .venv-gpu
#   OBLR_PYTHON           interpreter; by default python3 from PATH (in a container, the image's)
#   OBLR_GPUS_PER_NODE    8; 0 for CPU ranks, with OBLR_RANKS_PER_NODE (1) per node
#   OBLR_DRY_RUN          1; 0 skips the dry run (of such settings, other values are refused)
#   OBLR_GPU_MEMORY_GB    GPU memory for the dry run's memory table; by default that of the node's GPUs
#   OBLR_PREFLIGHT        1; 0 skips the preflight; OBLR_PREFLIGHT_S (300) is the deadline of each of its waits
#   OBLR_MIN_GB_S         0; required bus bandwidth of the preflight's all-reduces
#   OBLR_REQUEUE          1; 0 never requeues, and prints how to resume
#   OBLR_REQUEUE_FAILED   0; 1 also requeues after a failed run (but not after an input error)
#   OBLR_LOGS             directory in which the logs, NAME-JOBID.logs, are; by default OBLR_HOME
# Settings of the servers' script:
#   OBLR_SERVER_TP        rollout.tensor_parallel_size; GPUs per vLLM server (a node runs OBLR_GPUS_PER_NODE / it)
#   OBLR_SERVERS_S        1800; deadline in seconds for the servers to be ready

set -euo pipefail

readonly EXIT_RUN=1 EXIT_USER=2
readonly REPORT_S=30 # from the first failure of a task to the end of all
stopping=""   # name of the signal that asked this script to stop
child=""      # process id of the srun that receives forwarded signals
servers=""    # process id of the srun that runs the servers
signalled=0
margin=0 at_once=0 # seconds of --signal, if the job may be too short for it; 1: USR1 came in the first 30 s

# A full disk under the job's own output must not end the script: errexit would leave out the requeue.
say() { printf 'oblr: %s\n' "$*" || true; }

die() { # STATUS MESSAGE...
    printf 'error: %s\n' "${*:2}" >&2 || true
    exit "$1"
}

# Refuse a setting that is not a whole number within bounds; bash would read other texts as 0, a name or octal.
oblr_number() { # NAME VALUE LEAST MOST
    if [[ ! $2 =~ ^(0|[1-9][0-9]{0,3})$ ]] || (($2 < $3 || $2 > $4)); then
        die "$EXIT_USER" "$1 is '$2'. Fix: set it to a whole number from $3 to $4"
    fi
}

# Ask SLURM's controller for something; a busy one does not always answer at once.
oblr_ask() { # COMMAND...
    for _ in 1 2 3 4 5; do
        if "$@"; then return 0; fi
        sleep 3
    done
    return 1
}

# Run a whole job. Arguments: config overrides (section.key=value).
oblr_run() {
    oblr_begin "$@"
    oblr_check
    oblr_train
    oblr_end "$train_status"
}

# Run a whole job with vLLM servers on the second component of a heterogeneous job.
oblr_run_with_servers() {
    oblr_begin "$@"
    het=(--het-group=0)
    oblr_servers
    oblr_check
    oblr_start_servers
    oblr_train
    oblr_end "$train_status"
}

# --- setup -----------------------------------------------------------------------------------------------------------

oblr_begin() {
    [[ -n ${SLURM_JOB_ID:-} ]] || die "$EXIT_USER" "SLURM_JOB_ID is not set; start this script with sbatch"
    trap 'oblr_signal USR1' USR1 # first, because an untrapped one ends the script without a word
    trap 'oblr_signal TERM' TERM
    trap oblr_stop_servers EXIT
    script="$0"
    [[ $0 == /* ]] || script="$PWD/$0" # before cd
    cd "$OBLR_HOME"
    OBLR_HOME="$PWD"
    [[ -r $OBLR_CONFIG ]] || die "$EXIT_USER" "cannot read the config $OBLR_CONFIG in $OBLR_HOME; set OBLR_CONFIG"
    mapfile -t nodes < <(scontrol show hostnames "${SLURM_JOB_NODELIST_HET_GROUP_0:-$SLURM_JOB_NODELIST}")
    ((${#nodes[@]})) || die "$EXIT_RUN" "scontrol lists no node of job $SLURM_JOB_ID"
    job_name="${SLURM_JOB_NAME:-oblr}" attempt="${SLURM_RESTART_COUNT:-0}"
    local name
    for name in OBLR_{DRY_RUN,PREFLIGHT,REQUEUE,REQUEUE_FAILED}; do oblr_number "$name" "${!name:-0}" 0 1; done
    gpus="${OBLR_GPUS_PER_NODE:-8}"
    oblr_number OBLR_GPUS_PER_NODE "$gpus" 0 64
    ranks="$gpus"
    ((gpus > 0)) || ranks="${OBLR_RANKS_PER_NODE:-1}"
    oblr_number OBLR_RANKS_PER_NODE "$ranks" 1 1024
    log_root="${OBLR_LOGS:+$OBLR_LOGS/}$job_name-$SLURM_JOB_ID.logs" logs="" het=()
    mkdir -p "$log_root/attempt_$attempt"
    logs="$(cd "$log_root/attempt_$attempt" && pwd)"
    oblr_overrides "$@"
    oblr_time
    oblr_margin
    oblr_cpu_bind
    oblr_python
    oblr_environment
    oblr_ports
    say "job $SLURM_JOB_ID, attempt $attempt, ${#nodes[@]} nodes x $ranks ranks: ${nodes[*]}"
    say "config $OBLR_CONFIG, run directory $run_dir, logs $logs," \
        "commit $(git rev-parse --short HEAD 2>/dev/null || echo none)"
    oblr_start_over
}

# The run directory is the last run_dir=... argument, or named after the job id, which a requeue keeps. A name of digits
# is in TOML's quotes: the config needs them, and paths of this script must not have them.
oblr_overrides() {
    local word blank='[[:space:]]*'
    overrides=() run_dir="runs/$job_name-$SLURM_JOB_ID"
    for word in "$@"; do
        if [[ $word =~ ^${blank}run_dir${blank}=$blank(.*[^[:space:]])?$blank$ ]]; then
            run_dir="${BASH_REMATCH[1]}"
        else
            overrides+=("$word")
        fi
    done
    overrides+=("run_dir=$run_dir")
    if [[ $run_dir == \"*\" || $run_dir == \'*\' ]]; then run_dir="${run_dir:1:-1}"; fi
}

# End time of the job, for checkpoint.exit_before_timeout_s; unset without a limit. SLURM 22.05 does not set it.
oblr_time() {
    local ends
    [[ -z ${SLURM_JOB_END_TIME:-} ]] || return 0
    ends="$(SLURM_TIME_FORMAT=standard oblr_ask scontrol show job "$SLURM_JOB_ID")" || return 0
    ends="$(sed -n 's/.* EndTime=\([^ ]*\).*/\1/p' <<<"$ends" | head -n 1)" || return 0
    SLURM_JOB_END_TIME="$([[ -n $ends ]] && date -d "$ends" +%s 2>/dev/null)" || return 0
    export SLURM_JOB_END_TIME
}

# Warn where SLURM would send the signal of --signal at once. sbatch's own --signal cannot be seen from here.
oblr_margin() {
    local seconds left
    seconds="$(sed -n 's/^#SBATCH --signal=B:USR1@//p' "$script" 2>/dev/null | head -n 1)" || seconds="" # unreadable
    [[ ! ${SBATCH_SIGNAL:-} =~ @([0-9]+) ]] || seconds="${BASH_REMATCH[1]}"
    [[ $seconds =~ ^[0-9]+$ && -n ${SLURM_JOB_END_TIME:-} ]] || return 0
    left=$((SLURM_JOB_END_TIME - $(date +%s)))
    ((left <= seconds + 60)) || return 0
    margin=$seconds
    say "warning: the job ends in $left s, and the script's --signal asks for a signal $margin s before the end." \
        "Without another --signal on sbatch's command line the run stops at once. Fix: a longer --time"
}

# Without --cpu-bind=none a task on an exclusive node may be bound to one core. A cluster without task plugin binds no
# task, and srun says so in every step that has the option.
oblr_cpu_bind() {
    cpu_bind=(--cpu-bind=none)
    if scontrol show config 2>/dev/null | grep -E '^TaskPlugin +=.*(none|null)' >/dev/null; then cpu_bind=(); fi
}

# The interpreter of every task, and srun's container options.
oblr_python() {
    python="${OBLR_PYTHON:-python3}" container=()
    local mounts="$OBLR_HOME:$OBLR_HOME${OBLR_CONTAINER_MOUNTS:+,$OBLR_CONTAINER_MOUNTS}" directory real link
    if [[ -n ${OBLR_CONTAINER:-} ]]; then
        local written=("$run_dir" "$logs")
        for link in "$run_dir"/*; do # such as hf, to another disk
            [[ -L $link && -d $link ]] || continue
            real="$(readlink -- "$link")"
            [[ $real == /* ]] || real="$(realpath -ms -- "$run_dir/$real")"
            written+=("$real")
        done
        # What is written beyond the mounts is lost with the container. A name that leads through a link is a second
        # place of its directory: the container does not have the link.
        for directory in "${written[@]}"; do
            [[ $directory == /* ]] || directory="$OBLR_HOME/$directory"
            real="$(realpath -m -- "$directory")"
            mkdir -p "$real" || die "$EXIT_USER" "cannot make $real on ${nodes[0]}. Fix: name another place"
            [[ $real == "$OBLR_HOME"/* ]] || mounts+=",$real:$real"
            [[ $directory == "$real" || $directory == "$OBLR_HOME"/* ]] || mounts+=",$real:$directory"
        done
        container=(--container-image="$OBLR_CONTAINER" --container-workdir="$OBLR_HOME" --no-container-mount-home)
        container+=(--container-mounts="$mounts")
    elif [[ -n ${OBLR_VENV:-} ]]; then
        python="$OBLR_VENV/bin/python"
        [[ -x $python ]] || die "$EXIT_USER" "OBLR_VENV=$OBLR_VENV has no bin/python"
    elif [[ -z ${OBLR_PYTHON:-}${VIRTUAL_ENV:-} && -x $OBLR_HOME/.venv-gpu/bin/python ]]; then
        python="$OBLR_HOME/.venv-gpu/bin/python" # of make gpu-env
    fi
}

# Environment of every task; variables that are already set keep their values, docs/cluster.md says why they are set.
# PYTORCH_CUDA_ALLOC_CONF is not set to expandable_segments, because engines open such memory slowly through CUDA IPC.
# SLURM_EXPORT_ENV=ALL: under sbatch --export=NONE tasks would get none of these variables.
oblr_environment() {
    local setting name
    ulimit -n "$(ulimit -Hn)" 2>/dev/null || true # srun passes it on; ranks have connections to all others
    [[ -z ${OBLR_CONTAINER:-} ]] || export PYTHONPATH="$OBLR_HOME${PYTHONPATH:+:$PYTHONPATH}" # not the image's copy
    # enroot may hide InfiniBand from an image that does not ask for it; NCCL would use TCP without a word.
    [[ -z ${OBLR_CONTAINER:-} || ! -e ${OBLR_RDMA:=/dev/infiniband/rdma_cm} ]] ||
        export MELLANOX_VISIBLE_DEVICES="${MELLANOX_VISIBLE_DEVICES:-all}"
    # A shell that was opened after the download has no HF_HOME.
    [[ -n ${HF_HOME:-} || ! -d $OBLR_HOME/models/hub ]] || export HF_HOME="$OBLR_HOME/models/hub"
    export SLURM_EXPORT_ENV=ALL PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 VLLM_NO_USAGE_STATS=1
    for setting in HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=8 NCCL_DEBUG=WARN \
        TORCH_NCCL_ASYNC_ERROR_HANDLING=1 TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1 \
        TORCH_NCCL_DEBUG_INFO_TEMP_FILE="$logs/nccl_trace_rank_"; do
        name="${setting%%=*}"
        export "$name=${!name:-${setting#*=}}"
    done
}

# A block of 20 ports derived from the job id, below the kernel's ephemeral ports; the next block if a port is taken.
oblr_ports() {
    local block
    for ((block = 0; block < 20; block++)); do
        port=$((12000 + (SLURM_JOB_ID * 20 + block * 20) % 18000))
        oblr_port_taken "$port" || oblr_port_taken $((port + 1)) || return 0
    done
    die "$EXIT_RUN" "no free port for the rendezvous on ${nodes[0]} between 12000 and 30000"
}

oblr_port_taken() { (: <"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

# --- steps -----------------------------------------------------------------------------------------------------------

# Exec srun with one task per trainer node. Arguments: more srun options, then the command.
oblr_srun() {
    local options=("${cpu_bind[@]}" "${container[@]}" ${SLURM_CPUS_ON_NODE:+"--cpus-per-task=$SLURM_CPUS_ON_NODE"})
    ((gpus == 0)) || options+=(--gpus-per-node="$gpus" --gpu-bind=none)
    exec srun --ntasks-per-node=1 --kill-on-bad-exit=1 --unbuffered --input=none "${options[@]}" "$@"
}

# Run a command in the background, so that signals are handled at once; return its status. After a signal nothing is
# started. One that comes during the start is passed on, a second later because bash loses it in a child's first moment.
oblr_await() {
    local status=0 before=0
    [[ -z $stopping ]] || return 138 # the status of a command that SIGUSR1 ended
    "$@" &
    child=$!
    [[ -z $stopping ]] || { sleep 1 && kill -USR1 "$child" 2>/dev/null; } || true
    while :; do
        before=$status signalled=0 status=0
        wait "$child" || status=$?
        ((signalled && status > 128)) || break # if the signal only interrupted wait, wait again
    done
    ((status != 127 || before == 0)) || status=$before # the command had ended when wait was interrupted
    child=""
    return "$status"
}

# The time limit is near (--signal=B:USR1@...) or the job is being cancelled: ranks save at the next step boundary.
# SIGUSR1 is forwarded instead of SIGTERM: SLURM sends SIGTERM to the ranks itself, and a second one would end them.
oblr_signal() {
    signalled=1
    # SLURM looks every 30 s for jobs that are due for their signal: one that is due at once gets it in its first 30 s.
    if [[ $1 == USR1 ]] && ((SECONDS <= 30)); then at_once=1; fi
    [[ $stopping == TERM ]] || stopping="$1"
    say "SIG$1: asking the run to save and stop"
    [[ -z $child ]] || kill -USR1 "$child" 2>/dev/null || true
}

# Dry run and preflight, before any rank starts. A problem ends the job with status 2 and without requeue.
oblr_check() {
    all=("${het[@]}" --nodes="${#nodes[@]}" --ntasks="${#nodes[@]}")
    local status=0 first=("${het[@]}" --nodes=1 --ntasks=1 --nodelist="${nodes[0]}") memory=()
    [[ -z ${OBLR_GPU_MEMORY_GB:-} ]] || memory=(--gpu-memory-gb "$OBLR_GPU_MEMORY_GB")
    if [[ ${OBLR_DRY_RUN:-1} != 0 ]]; then
        say "dry run: $logs/dry_run.log"
        oblr_await oblr_srun "${first[@]}" --output="$logs/dry_run.log" \
            "$python" -P -m oblr_megatron.cli train "$OBLR_CONFIG" "${overrides[@]}" --resume --dry-run \
            --nnodes "${#nodes[@]}" --nproc-per-node "$ranks" "${memory[@]}" || status=$?
        oblr_checked "$status" "the dry run" "$logs/dry_run.log"
    fi
    [[ ${OBLR_PREFLIGHT:-1} != 0 ]] || return 0
    say "preflight: $logs/preflight.log"
    oblr_await oblr_srun "${all[@]}" --output="$logs/preflight.log" \
        "$python" -P -m oblr_megatron.extras.cluster.preflight "$OBLR_CONFIG" "${overrides[@]}" \
        --nodes "$(IFS=, && echo "${nodes[*]}")" --expect-gpus "$gpus" --ranks-per-node "$ranks" \
        --port $((port + 1)) --rendezvous-port "$port" \
        --deadline "${OBLR_PREFLIGHT_S:-300}" --min-gb-s "${OBLR_MIN_GB_S:-0}" || status=$?
    oblr_checked "$status" "the preflight" "$logs/preflight.log"
}

oblr_checked() { # STATUS WHAT LOG
    oblr_stop_early "$2"
    if (($1 != 0)); then
        cat "$3" >&2 || true # absent if srun could not make the step
        die "$EXIT_USER" "$2 failed (status $1); nothing was trained and the job is not requeued"
    fi
}

# Start one task per node, which starts the node's ranks; the status is returned in train_status. When one node refuses
# its input, srun ends the others and returns their status, which is higher than 2. Its messages have the status of
# every node.
oblr_train() {
    say "training: follow the logs with: tail -F $logs/node_*.log"
    status_before="$(oblr_status)" # of the previous attempt
    train_status=0
    oblr_await oblr_launch 2>>"$logs/srun.log" || train_status=$?
    cat "$logs/srun.log" >&2 || true
    if grep -q "Exited with exit code $EXIT_USER\$" "$logs/srun.log"; then train_status=$EXIT_USER; fi
}

# Exec the srun of the launchers. It waits for every node's report, which a node that it cannot reach never brings: it is
# ended when a task has failed, and others have not reported for a while. What it leaves behind ends with the job.
oblr_launch() {
    local waiting=$BASHPID node heard silent
    while kill -0 "$waiting" && sleep 1; do
        grep -q 'error: .*: tasks\? ' "$logs/srun.log" || continue
        sleep "$REPORT_S"
        heard="$(sed -n 's/.*error: \(.*\): tasks\{0,1\} .*/\1/p' "$logs/srun.log" |
            while read -r node; do scontrol show hostnames "$node"; done)" silent=""
        for node in "${nodes[@]}"; do grep -qxF "$node" <<<"$heard" || silent+=" $node"; done
        kill -0 "$waiting" || break
        echo "error: a task has failed, and for $REPORT_S s there was no report of:$silent" >>"$logs/srun.log"
        kill -KILL "$waiting"
    done 2>/dev/null &
    oblr_srun "${all[@]}" --output="$logs/node_%n.log" \
        "$python" -P -m oblr_megatron.runtime.launch --nnodes "${#nodes[@]}" --nproc-per-node "$ranks" --max-restarts 0 \
        --rdzv-id "$SLURM_JOB_ID-$attempt" --rdzv-backend c10d --rdzv-endpoint "${nodes[0]}:$port" \
        -m oblr_megatron.step_loop "$OBLR_CONFIG" "${overrides[@]}" --resume
}

# --- servers ---------------------------------------------------------------------------------------------------------

# GPUs of an engine: rollout.tensor_parallel_size of the overrides, else of the config, else 1; 1 without GPUs.
oblr_engine_tp() {
    local key=rollout.tensor_parallel_size found
    found="$(printf '%s\n' "${overrides[@]}" | sed -n "s/^$key *= *//p" | tail -n 1)"
    [[ -n $found ]] || found="$(awk -F '[=#[:space:]]+' '/^\[/ { on = $1 == "[rollout]" }
        on && $1 == "tensor_parallel_size" { print $2 }' "$OBLR_CONFIG")"
    ((gpus > 0)) && echo "${found:-1}" || echo 1
}

# The servers' URLs, and the API key that they share with the trainers.
oblr_servers() {
    local list="${SLURM_JOB_NODELIST_HET_GROUP_1:-}" host k
    [[ -n $list ]] || die "$EXIT_USER" "the job has no second component; submit this script with its hetjob line"
    mapfile -t server_nodes < <(scontrol show hostnames "$list")
    server_tp="${OBLR_SERVER_TP:-$(oblr_engine_tp)}" servers_each=1 urls=()
    oblr_number OBLR_SERVER_TP "$server_tp" 1 $((gpus > 0 ? gpus : 1))
    ((gpus == 0)) || servers_each=$((gpus / server_tp))
    for host in "${server_nodes[@]}"; do
        for ((k = 0; k < servers_each; k++)); do urls+=("http://$host:$((port + 2 + k))"); done
    done
    OBLR_API_KEY="$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')" # other users cannot read an environment
    export OBLR_API_KEY
    overrides+=("rollout.servers=[$(printf '"%s",' "${urls[@]}" | sed 's/,$//')]")
}

# Start the servers on the second component's nodes, and wait until all answer.
oblr_start_servers() {
    local status=0 options=()
    options=(--het-group=1 --nodes="${#server_nodes[@]}" --ntasks-per-node="$servers_each" --kill-on-bad-exit=0)
    options+=(--ntasks="${#urls[@]}" --input=none) # the header's number of tasks is for one GPU a server
    ((gpus == 0)) || options+=(--gpus-per-node="$gpus" --gpu-bind=none)
    options+=("${cpu_bind[@]}" --output="$logs/server_%t.log" "${container[@]}")
    say "servers: ${urls[*]}; $logs/server_K.log"
    srun "${options[@]}" "$python" -P -m oblr_megatron.extras.cluster.servers start "$OBLR_CONFIG" "${overrides[@]}" \
        --port $((port + 2)) --tensor-parallel-size "$server_tp" 2>"$logs/server_srun.log" &
    servers=$!
    oblr_await oblr_servers_answer || status=$?
    oblr_stop_early "the start of the servers"
    ((status != 0)) || return 0
    tail -n 20 "$logs"/server_*.log >&2 || true
    kill -0 "$servers" 2>/dev/null || die "$EXIT_RUN" "all servers have ended, see $logs/server_*.log; not requeued"
    cat "$logs"/servers*.log "$logs/server_srun.log" >&2 || true
    die "$EXIT_RUN" "the servers did not become ready; the job is not requeued"
}

# Exec the wait for the servers, and end it when one of them has ended, or their srun.
oblr_servers_answer() {
    local waiting=$BASHPID
    while kill -0 "$waiting" && sleep 1; do
        if ! kill -0 "$servers" || grep -q 'error: .*: tasks\? ' "$logs/server_srun.log"; then kill "$waiting"; fi
    done 2>/dev/null &
    oblr_srun --het-group=0 --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" --output="$logs/servers.log" \
        "$python" -P -m oblr_megatron.extras.cluster.servers wait "${urls[@]}" --deadline "${OBLR_SERVERS_S:-1800}" \
        2>"$logs/servers_srun.log"
}

# End the servers on every exit; processes that srun leaves behind end with the job.
oblr_stop_servers() {
    [[ -n $servers ]] || return 0
    kill -TERM "$servers" 2>/dev/null || true
    local waited
    for ((waited = 0; waited < 30; waited++)); do
        kill -0 "$servers" 2>/dev/null || break
        sleep 1
    done
    kill -KILL "$servers" 2>/dev/null || true
    servers=""
}

# --- the end ---------------------------------------------------------------------------------------------------------

oblr_status() { cat "$run_dir/status.json" 2>/dev/null || true; }

# A field of status.json, once this attempt has written it.
oblr_field() {
    local status
    status="$(oblr_status)"
    [[ $status == "${status_before:-}" ]] || sed -n "s/^ *\"$1\": \"\{0,1\}\([^\",]*\).*/\1/p" <<<"$status"
}

# Wait for status.json of a run that ended with status 0; a shared file system may show it a minute late.
oblr_await_outcome() {
    local waited
    for ((waited = 0; waited < 90; waited += 2)); do
        case "$(oblr_field state)" in finished | stopped) return 0 ;; esac
        sleep 2
        ls "$run_dir" >/dev/null 2>&1 || true
    done
}

# Step of the newest checkpoint, or of the newest samples of a run that only samples; 0 if there is none.
oblr_saved_step() {
    local saved=("$run_dir"/checkpoints/step_*) newest
    if grep -qs '"only": true' "$run_dir/config.json"; then saved=("$run_dir"/rollouts/step_*.parquet); fi
    newest="$(printf '%s\n' "${saved[@]%.parquet}" | sed -n 's/.*step_0*\([0-9][0-9]*\)$/\1/p' | sort -n | tail -n 1)"
    echo "${newest:-0}"
}

# What to do next. Steps without a checkpoint cannot be resumed, and are not overwritten.
oblr_next() {
    if [[ $(oblr_saved_step) == 0 ]] && grep -qs '"step": [1-9]' "$run_dir/metrics.jsonl"; then
        echo "it has no checkpoint: start again without run_dir"
    else
        echo "resume with: sbatch ... run_dir=$run_dir"
    fi
}

# A requeued run without a checkpoint, because a node was lost or it failed, starts over: its records are put aside.
# Those of an earlier job stay, and the dry run refuses them.
oblr_start_over() {
    local steps aside="$run_dir/metrics_before_$SLURM_JOB_ID-$attempt.jsonl"
    ((attempt > 0 && $(oblr_saved_step) == 0)) || return 0
    ! compgen -G "$run_dir/hf/*" >/dev/null && ! compgen -G "$run_dir/hf_best/*" >/dev/null || return 0
    compgen -G "$log_root/attempt_*/node_*.log" >/dev/null || return 0 # no attempt of this job has trained
    steps="$(grep -c '"step": [1-9]' "$run_dir/metrics.jsonl" 2>/dev/null)" || return 0
    mv "$run_dir/metrics.jsonl" "$aside"
    say "the run has no checkpoint: $steps steps are done again; their old records are in $aside"
}

# Requeue or say why not, and exit. The argument is the status of the training.
oblr_end() {
    local status="$1" state reason
    ((status != 0)) || oblr_await_outcome
    state="$(oblr_field state)"
    reason="$(oblr_field reason)" # bash 5.2 dies of a trapped signal between two $() of one command
    # a signal may come between the run's last record and its launchers' ends, and give them its status
    if ((status != EXIT_USER)) && [[ $state == finished || ($state == stopped && -n $stopping) ]]; then status=0; fi
    if ((status == 0)) && [[ $state == finished ]]; then
        say "finished after step $(oblr_field step): $run_dir"
        exit 0
    fi
    if ((status == EXIT_USER)); then
        oblr_tell_errors
        die "$EXIT_USER" "the run refused its input; the job is not requeued"
    fi
    if [[ $stopping == TERM || $reason == SIGTERM ]]; then # a cancelled job must not be requeued
        oblr_tell_errors
        say "ended by SIGTERM after step $(oblr_field step); this script does not requeue it"
        exit $((status == 0 ? 0 : EXIT_RUN))
    fi
    if ((status == 0)) && [[ $state == stopped ]]; then
        oblr_requeue "stopped ($reason)" 0
    elif [[ -n $stopping && -z $state ]]; then # the signal came before the ranks handled signals
        oblr_requeue "ended by SIG$stopping before the first step" "$EXIT_RUN"
    fi
    oblr_tell_errors
    if [[ ${OBLR_REQUEUE_FAILED:-0} == 1 ]]; then oblr_requeue "failed (status $status)" "$EXIT_RUN"; fi
    die "$EXIT_RUN" "the run failed (status $status); $(oblr_next)"
}

# Handle a signal that came before the ranks were started.
oblr_stop_early() { # DURING
    [[ -n $stopping ]] || return 0
    [[ $stopping != TERM ]] || die "$EXIT_RUN" "ended by SIGTERM during $1; this script does not requeue it"
    oblr_requeue "ended by SIG$stopping during $1" "$EXIT_RUN"
}

oblr_tell_errors() {
    grep -h -a -m 5 -E '^error:|^[A-Za-z_.]+Error:' "$logs"/node_*.log >&2 || true
}

# Requeue the job, except if no step was saved since the last requeue, because that could repeat forever; or if every
# attempt would get its signal at once.
oblr_requeue() { # WHY STATUS_IF_NOT_REQUEUED
    local step before="" id="$SLURM_JOB_ID"
    step="$(oblr_saved_step)"
    if [[ ${OBLR_REQUEUE:-1} == 0 ]]; then
        say "$1, step $step is saved; $(oblr_next)"
        exit "$2"
    fi
    if ((at_once && margin > 0)); then
        say "$1, step $step is saved; not requeued, because every attempt would get its signal at once"
        die "$EXIT_USER" "--time is not longer than the margin of --signal ($margin s)." \
            "Fix: sbatch --time=... run_dir=$run_dir"
    fi
    [[ ! -e $log_root/requeues ]] || before="$(tail -n 1 "$log_root/requeues")"
    if [[ $before == "$step" ]]; then
        say "$1, and nothing was saved since the last requeue; raise --time, or check $logs"
        die "$EXIT_RUN" "no progress beyond step $step; not requeued again"
    fi
    echo "$step" >>"$log_root/requeues" || say "warning: cannot note the requeue in $log_root"
    say "$1, step $step is saved: the job is requeued"
    oblr_stop_servers
    # The id of an array's last task is the array's, too. A job that such a task submitted has its variables.
    [[ ${SLURM_ARRAY_JOB_ID:-} != "$id" ]] || id+="_$SLURM_ARRAY_TASK_ID"
    oblr_ask scontrol requeue "$id" ||
        die "$EXIT_RUN" "scontrol cannot requeue the job; $(oblr_next)"
    exit 0
}
