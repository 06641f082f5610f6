# `make demo` and `make test` do all their own set-up on a machine with Python >= 3.10.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BENCH_STAMP := $(VENV)/.installed-bench
NPROC ?= 2
ARGS ?=
EXAMPLES ?= 3000

.DEFAULT_GOAL := help
.PHONY: help setup demo example-remote test fuzz lint format bench bench-engines bench-hosts clean

help:  ## show the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

setup: $(STAMP)  ## create .venv and install everything into it

$(STAMP): requirements/dev.txt pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing the pinned requirements into $(VENV) (once; torch is large) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/dev.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $(STAMP)

demo: $(STAMP)  ## train a language model twice, replicated and sharded, and compare
	$(BIN)/python -m tensorplay.examples.train_lm --nproc $(NPROC) $(ARGS)

example-remote: $(STAMP)  ## train a network on a parameter server from two trainers
	$(BIN)/python -m tensorplay.examples.parameter_server $(ARGS)

test: $(STAMP)  ## run the tests
	$(BIN)/python -m pytest $(ARGS)

fuzz: $(STAMP)  ## run EXAMPLES new random training runs against the plain optimizer
	FUZZ_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest tests/zero/test_generated.py $(ARGS)

lint: $(STAMP)  ## ruff, mypy --strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(STAMP)  ## format the code and apply ruff's safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) $(BENCH_STAMP)  ## compare a training step with the peers'; ARGS="--help" lists all benchmarks
	$(BIN)/python -m benchmarks $(or $(ARGS),step)

bench-engines: $(STAMP)  ## install DeepSpeed and Megatron-core, so that `make bench` compares with them too
	$(BIN)/python -m pip install --quiet --disable-pip-version-check setuptools wheel
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
		--no-build-isolation -r requirements/bench-engines.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check pydantic

bench-hosts: $(STAMP)  ## the same between hosts with a slow link: network namespaces, as root
	$(BIN)/python -m benchmarks hosts $(ARGS)

# Peers to compare with. They may not change torch, so they come without their dependencies; a
# benchmark says which are missing.
$(BENCH_STAMP): requirements/bench.txt | $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -r requirements/bench.txt \
		&& touch $(BENCH_STAMP) || echo "Some peers could not be installed; the benchmarks go on without them."

clean:  ## remove caches and outputs, keep .venv
	rm -rf runs .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
