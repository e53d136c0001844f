#!/usr/bin/env bash
# Build Transformer Engine's torch part, which has no wheel, against the torch that gpu.txt has installed:
#     requirements/build_te.sh PYTHON
# Makefile and Dockerfile call it. It compiles C++ only, with the headers of the NVIDIA wheels in gpu.txt. So it needs
# g++ and Python.h, but neither a CUDA toolkit nor a GPU. MAX_JOBS: compilers at a time (by default one a core), 2 GB
# each.
set -euo pipefail

python=${1:?usage: requirements/build_te.sh PYTHON}
cd "$(dirname "${BASH_SOURCE[0]}")"
if ! command -v g++ >/dev/null; then
  echo "build_te.sh: there is no g++. Fix: install it (Debian and Ubuntu: apt-get install g++)" >&2
  exit 2
fi

nvidia=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia
export CUDA_HOME=$nvidia/cu13 # its headers; nvcc is only asked for its version
export CPATH=$nvidia/cudnn/include:$nvidia/nccl/include${CPATH:+:$CPATH}
export NVTE_PYTORCH_FORCE_BUILD=TRUE # else it asks GitHub for a wheel first
export MAX_JOBS=${MAX_JOBS:-$(env -u OMP_NUM_THREADS nproc)} # nproc heeds OMP_NUM_THREADS

# --no-build-isolation: in isolation pip builds against the newest torch, and the result does not import.
"$python" -m pip install --quiet --no-deps --no-build-isolation --requirement te.txt
"$python" -c 'import torch, transformer_engine.pytorch' # torch first: it loads the CUDA libraries of the wheels
