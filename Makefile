# One line per target; `make` alone prints them.
.DEFAULT_GOAL := help
.PHONY: help setup train check test test-ranks test-slow test-backends test-vllm bench bench-peers tensorboard clean

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PEERS ?= .venv-peers
BACKENDS ?= .venv-backends
VLLM ?= .venv-vllm
ARGS ?=
WORKERS ?= 2
RESULTS := $(if $(SMALL),outputs/bench,benchmarks/results)

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## make the virtual environment

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

train: setup ## train the built-in example (ARGS='environment=countdown' passes settings on)
	$(BIN)/python train.py $(ARGS)

check: setup ## lint, format, types and who-imports-whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_architecture.py

test: setup ## all tests but the slow ones
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

test-ranks: setup ## only the tests that start several processes
	$(BIN)/python -m pytest -m "ranks and not slow" $(ARGS)

test-slow: setup ## further layouts and families, which make test leaves out for time
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m slow $(ARGS)

test-backends: $(BACKENDS)/.ready ## the strategies around other projects, in an environment of its own (1.3 GB of packages more)
	$(BACKENDS)/bin/python -m pytest -m backends $(ARGS)
	$(BACKENDS)/bin/python train.py parity

$(BACKENDS)/.ready: pyproject.toml constraints.txt tests/backends.txt
	$(PYTHON) -m venv $(BACKENDS)
	$(BACKENDS)/bin/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BACKENDS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	$(BACKENDS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement tests/backends.txt
	touch $@

test-vllm: setup $(VLLM)/.ready ## tests against a real vLLM, in an environment of its own (3.4 GB)
	RLMODULE_VLLM_PYTHON=$(abspath $(VLLM)/bin/python) $(BIN)/python -m pytest -s -q tests/end_to_end/test_real_vllm.py $(ARGS)

$(VLLM)/.ready: tests/helpers/vllm_needs.txt tests/helpers/vllm_environment.py
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --requirement tests/helpers/vllm_needs.txt
	$(VLLM)/bin/python tests/helpers/vllm_environment.py
	touch $@

bench: setup ## measure, draw, and fill the tables of docs/performance.md (SMALL=1: a quick look that changes no file)
	mkdir -p $(RESULTS)
	$(BIN)/python benchmarks/planner.py $(if $(SMALL),--small,--large) --json $(RESULTS)/planner.json
	$(BIN)/python benchmarks/update.py $(if $(SMALL),--small) --json $(RESULTS)/update.json
	$(if $(SMALL),,$(BIN)/python benchmarks/update.py --vocabulary 151936 --json $(RESULTS)/update_151936.json)
	$(BIN)/python benchmarks/memory.py $(if $(SMALL),--small) --json $(RESULTS)/memory.json
	$(BIN)/python benchmarks/loop.py $(if $(SMALL),--small) --json $(RESULTS)/loop.json
	$(BIN)/python benchmarks/rollout.py $(if $(SMALL),--small) --json $(RESULTS)/rollout.json
	$(BIN)/python benchmarks/scaling.py $(if $(SMALL),--small) --json $(RESULTS)/scaling.json
	$(BIN)/python benchmarks/report.py --results $(RESULTS) $(if $(SMALL),--out $(RESULTS)/performance.md)

bench-peers: $(PEERS)/.ready ## the same work by verl, OpenRLHF and TRL, in an environment of its own
	mkdir -p $(RESULTS)
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE $(PEERS)/bin/python benchmarks/peers.py $(if $(SMALL),--small) --json $(RESULTS)/peers.json
	$(PEERS)/bin/python benchmarks/iteration_trl.py $(if $(SMALL),--small) --json $(RESULTS)/iteration_trl.json
	$(PEERS)/bin/python benchmarks/report.py --results $(RESULTS) $(if $(SMALL),--out $(RESULTS)/performance.md)

$(PEERS)/.ready: pyproject.toml constraints.txt benchmarks/peers.txt benchmarks/peers_needs.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable . --requirement benchmarks/peers_needs.txt
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement benchmarks/peers.txt
	touch $@

tensorboard: setup ## look at the curves of every run
	$(BIN)/tensorboard --logdir outputs

clean: ## remove the environment and caches, never your runs
	rm -rf $(VENV) $(PEERS) $(BACKENDS) $(VLLM) .mypy_cache .ruff_cache .pytest_cache *.egg-info
