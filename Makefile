# make run, make test: each makes its own environment first, once. PYTHON chooses the interpreter (3.11 or newer).
PYTHON ?= python3
VENV ?= .venv
# Files of tests that run at a time.
AT_ONCE ?= 2
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help run test test-all test-gpu lint bench notebooks publish clean
.DEFAULT_GOAL := help

help: ## these targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

run: $(READY) ## sweep six policies over a real model, about 10 minutes on two cores; again: seconds
	$(BIN)/python -m experiments.run experiment=quickstart

test: $(READY) lint ## lint, types and the quick tests, about 10 minutes
	$(BIN)/python -m pytest -m "not slow" -n $(AT_ONCE) --dist loadfile

test-all: $(READY) lint ## every test, the slow ones too
	$(BIN)/python -m pytest

lint: $(READY) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY) ## what replay, decoding and simulation cost: three tables; the first takes a quarter of an hour or more
	$(BIN)/python -m experiments.run experiment=bench_replay
	$(BIN)/python -m experiments.run experiment=bench_decode
	$(BIN)/python -m experiments.run experiment=bench_simulation

test-gpu: $(READY) ## the GPU's kernels: on a card, or in Triton's interpreter on a CPU
	$(BIN)/python -m pytest tests/test_gpu.py tests/test_graphs.py

notebooks: $(READY) ## execute analysis/*.py into notebooks, from the latest sweeps or the published frames
	$(BIN)/python analysis/build.py

publish: $(READY) ## copy the latest quickstart's table, figure and frame to results/quickstart
	$(BIN)/python -m experiments.publish quickstart

clean: ## remove the environment; results stay
	rm -rf $(VENV)

$(READY): pyproject.toml conf/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "this Python cannot make environments; on Debian: apt install python3-venv"; exit 2; }
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -e '.[dev]' -c conf/constraints.txt
	@touch $(READY)
