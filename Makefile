# Needs make, Python 3.11+ with venv, glibc and a package index. Nothing is installed outside .venv* and the user's cache.
PYTHON ?= python3
FOLDER ?=
ONLY ?=
WORKERS ?= $(shell echo $$(($$(nproc) + 1)))
VENV ?= .venv
BIN = $(VENV)/bin

export PYTHON VENV WORKERS
MAKEFLAGS += --no-print-directory
SHELL = bash
.SHELLFLAGS = -euo pipefail -c
.DEFAULT_GOAL = help
.PHONY: help demo venv check check-format check-lint check-layers check-mypy check-pyright check-unit test test-all soak contract mutants bench bench-quick bench-peers format clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.demo ## Index this repository by jobs on an embedded Postgres; FOLDER=... takes another folder
	@$(BIN)/python -m pgworker demo $(if $(FOLDER),"$(FOLDER)")

venv: $(VENV)/.dev ## Make .venv with all that development needs

check: $(VENV)/.dev ## Format, lint, layers, types, unit tests: no database, under 40 s
	@$(MAKE) --jobs=2 --keep-going --output-sync=target check-mypy check-pyright check-format check-lint check-layers check-unit

check-format:
	@$(BIN)/ruff format --check .

check-lint:
	@$(BIN)/ruff check --quiet .

# Without its cache, which goes on saying what an import led to when the imported file was not there yet.
check-layers:
	@$(BIN)/lint-imports --no-logo --no-cache

check-mypy:
	@$(BIN)/mypy

check-pyright:
	@$(BIN)/pyright --pythonpath $(BIN)/python

check-unit:
	@$(BIN)/python -m pytest -q tests/unit

test: check ## All of check, then the whole quick suite: under 4 minutes
	@.ci/legs.sh test

test-all: check ## PostgreSQL 14 to 18, Python 3.11 to 3.13, containers, and the slow tests
	@.ci/legs.sh all

soak: $(VENV)/.dev ## The tests that take minutes or gigabytes
	@$(BIN)/python -m pytest -m soak

contract: $(VENV)/.dev ## Which promises of tests/contract/promises.toml are kept, by the tests that name them
	@$(BIN)/python -m pytest --contract -m "not soak" -n $(WORKERS)

mutants: $(VENV)/.dev ## Change each term of each statement, each row of each table: a test must fail; ONLY=claim_jobs takes one
	@$(BIN)/python -m tests.mutants $(if $(ONLY),--only "$(ONLY)")

bench: $(VENV)/.dev ## P1 to P12 beside their floors, on a Postgres of its own: twenty minutes; ONLY="P1 P4" takes some
	@$(BIN)/python -m benchmarks --full $(ONLY)

bench-quick: $(VENV)/.dev ## The same, tiny: shows what is broken, measures nothing, under a minute
	@$(BIN)/python -m benchmarks --quick $(ONLY)

bench-peers: $(VENV)/.dev ## procrastinate, pgqueuer, chancy and oban on the same work, each in its own .venv-peers/*
	@$(BIN)/python -m benchmarks --peers $(ONLY)

format: $(VENV)/.dev ## Format and mend what ruff can mend
	@$(BIN)/ruff check --fix --quiet . || true
	@$(BIN)/ruff format .

clean: ## Remove virtual environments, caches and build output
	rm -rf .venv* dist build tests/out benchmarks/out .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One stamp for what the demo needs, one for development, which has it too. Each is as old as the pyproject.toml it is made from.
$(VENV)/.demo: pyproject.toml
	@$(call install,.[embedded])
	@touch $@

$(VENV)/.dev: pyproject.toml
	@$(call install,.[dev])
	@touch $(VENV)/.demo $@

define install
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12 ...")'
	echo "installing $(1) into $(VENV)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --disable-pip-version-check --editable '$(1)'
endef
