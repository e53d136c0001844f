#!/usr/bin/env bash
#SBATCH --job-name=oblr_servers
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
#SBATCH hetjob
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0

# Trainers on the nodes of the first component, vLLM servers on those of the second:
#     sbatch slurm/oblr_servers.sh PRESET [section.key=value ...]       a file of slurm/configs without .toml: qwen3_8b
#     sbatch -p P --nodes=4 : -p P --nodes=2 slurm/oblr_servers.sh qwen2.5_32b    other numbers of nodes
# Add rollout.overlap=stream and fewer algo.snr.num_folds, or trainers and servers wait for each other.
# Settings: slurm/lib.sh. Documentation: docs/cluster.md.
OBLR_HOME="${OBLR_HOME:-${SLURM_SUBMIT_DIR:-$PWD}}"
if [[ ! -r $OBLR_HOME/slurm/lib.sh ]]; then
    echo "error: no slurm/lib.sh in $OBLR_HOME; call sbatch in the repository's root, or export OBLR_HOME" >&2
    exit 2
fi
if [[ ! -r $OBLR_HOME/slurm/configs/${1:-}.toml ]]; then
    presets="$(cd "$OBLR_HOME/slurm/configs" && printf '%s, ' *.toml | sed 's/\.toml//g; s/, $//')"
    echo "error: no preset ${1:-(none given)}. Fix: give one of $presets as first argument" >&2
    exit 2
fi
OBLR_CONFIG="${OBLR_CONFIG:-slurm/configs/$1.toml}"
shift
# shellcheck source=slurm/lib.sh
source "$OBLR_HOME/slurm/lib.sh"
oblr_run_with_servers "$@"
