# `make demo` and `make test` do all their own set-up on a machine with Python >= 3.10.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NPROC ?= 2
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format bench clean

help:  ## show the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

setup: $(STAMP)  ## create .venv and install everything into it

$(STAMP): requirements/dev.txt pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing the pinned requirements into $(VENV) (once; torch is large) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/dev.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $(STAMP)

demo: $(STAMP)  ## train a language model twice, replicated and sharded, and compare
	$(BIN)/python -m tensorplay.examples.train_lm --nproc $(NPROC) $(ARGS)

test: $(STAMP)  ## run the tests
	$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP)  ## ruff, mypy --strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(STAMP)  ## format the code and apply ruff's safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## run the benchmarks
	$(BIN)/python -m benchmarks $(ARGS)

clean:  ## remove caches and outputs, keep .venv
	rm -rf runs .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
