# make train   train the debug model in high precision and in FP8, compare them
# make test    the test suite
# make test-all   the suite and its exhaustive sweeps: every configuration and shape, more than half an hour
# make check   what every commit must pass: lint, types, fast tests
# make test-amd   every AMD code object: compiled, inspected, executed
# make test-torchtitan   an environment with TorchTitan and its PyTorch, and its debug models in two processes
# make setup   the virtual environment in .venv, alone

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
OUT ?= runs/train
# Two test processes of one thread each fill a small machine without fighting over its cores.
# A process that dies ends the run: xdist can wait forever for the tests of one that it replaced.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --max-worker-restart=0

# TorchTitan 0.3 needs PyTorch 2.14, which has an environment of its own.
TITAN_VENV := .venv-torchtitan
TITAN_BIN := $(TITAN_VENV)/bin
TITAN_STAMP := $(TITAN_VENV)/.installed

.PHONY: setup train test test-all test-amd test-torchtitan check lint fast clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed, $(PYTHON) is older: make setup PYTHON=python3.11" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "$(PYTHON) cannot make virtual environments: apt install python3-venv" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt 'torch==2.13.0'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

train: setup
	$(BIN)/octavo train --model llama3-debug --recipe rowwise --compare bf16 --steps 30 --out $(OUT)

test: setup
	$(PYTEST)

fast: setup
	$(PYTEST) -m 'not slow and not exhaustive'

test-all: setup
	$(PYTEST) -m ''

test-amd: setup
	$(PYTEST) -m amd tests/amd

$(TITAN_STAMP): pyproject.toml
	test -x $(TITAN_BIN)/python || $(PYTHON) -m venv $(TITAN_VENV)
	$(TITAN_BIN)/python -m pip install --quiet --disable-pip-version-check 'torch==2.14.1' 'torchtitan==0.3.0' \
	  'triton>=3.6,<3.10' 'pytest>=8.0' 'pytest-timeout>=2.3' 'hypothesis>=6.100' -e .
	touch $@

test-torchtitan: $(TITAN_STAMP)
	OMP_NUM_THREADS=1 $(TITAN_BIN)/python -m pytest --durations=10 tests/titan tests/distributed

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

check: lint fast

clean:
	rm -rf $(VENV) $(TITAN_VENV) runs build src/*.egg-info
