#!/usr/bin/env bash
#SBATCH --job-name=oblr_qwen3_235b_a22b
#SBATCH --nodes=16
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=48:00:00
#SBATCH --signal=B:USR1@1800
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out

# Qwen3-235B-A22B on 16 nodes of 8 H100s: sbatch slurm/oblr_qwen3_235b_a22b.sh [section.key=value ...]
# Settings: slurm/lib.sh. Documentation: docs/cluster.md.
OBLR_CONFIG="${OBLR_CONFIG:-slurm/configs/qwen3_235b_a22b.toml}"

OBLR_HOME="${OBLR_HOME:-${SLURM_SUBMIT_DIR:-$PWD}}"
if [[ ! -r $OBLR_HOME/slurm/lib.sh ]]; then
    echo "error: no slurm/lib.sh in $OBLR_HOME; call sbatch in the repository's root, or export OBLR_HOME" >&2
    exit 2
fi
# shellcheck source=slurm/lib.sh
source "$OBLR_HOME/slurm/lib.sh"
oblr_run "$@"
