#!/usr/bin/env bash
#SBATCH --job-name=oblr_qwen3_8b_lora
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --mem=200G
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out

# Adapters of Qwen3-8B on 1 H100 of a node: sbatch slurm/oblr_qwen3_8b_lora.sh [section.key=value ...]
# The preset of the whole model with the keys below; a config of your own, given as OBLR_CONFIG, has its own keys.
# Documentation: docs/lora.md, docs/cluster.md; settings: slurm/lib.sh.
keys=(
    model.lora.rank=16
    optimizer.lr=1e-5
    num_prompts=64
    parallel.tensor_model_parallel_size=1
    parallel.pipeline_model_parallel_size=1
    parallel.sequence_parallel=false
    rollout.tensor_parallel_size=1
)
[[ -z ${OBLR_CONFIG:-} ]] || keys=()
OBLR_CONFIG="${OBLR_CONFIG:-slurm/configs/qwen3_8b.toml}"
OBLR_GPUS_PER_NODE="${OBLR_GPUS_PER_NODE:-1}"

OBLR_HOME="${OBLR_HOME:-${SLURM_SUBMIT_DIR:-$PWD}}"
if [[ ! -r $OBLR_HOME/slurm/lib.sh ]]; then
    echo "error: no slurm/lib.sh in $OBLR_HOME; call sbatch in the repository's root, or export OBLR_HOME" >&2
    exit 2
fi
# shellcheck source=slurm/lib.sh
source "$OBLR_HOME/slurm/lib.sh"
oblr_run "${keys[@]}" "$@"
