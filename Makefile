# `make` lists the targets. All that is made stays in .venv and in the ignored cache folders.

PYTHON ?= python3
VENV ?= .venv
VLLM_VERSION ?= 0.33
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# A stamp per set of packages: newer than its lock means that the set is installed.
DEMO := $(VENV)/.demo
DEV := $(VENV)/.dev
BENCH := $(VENV)/.bench
RELEASE := $(VENV)/.release

.DEFAULT_GOAL := help
.PHONY: help install fmt lint types test cov chaos demo e2e bench bench-rfc bench-peers check lock audit image docs dist clean
.DELETE_ON_ERROR:

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

install: $(DEV)  ## .venv with everything that tests and tools need

demo: $(DEMO)  ## simulated workers and the coordinator, no GPU: make demo ARGS='--ask "Hello"'
	@$(BIN)/coordinator demo $(ARGS)

# Each worker, and each process that a test starts, would compile all there is if none might keep what it has compiled.
test: export PYTHONDONTWRITEBYTECODE =
test: $(DEV)  ## the quick tests: make test ARGS='-k sse'
	$(BIN)/python -m pytest -m "not e2e" -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder $(ARGS)

cov: $(DEV)  ## the quick tests, with the lines and branches that they miss
	$(BIN)/python -m pytest -m "not e2e" --cov=coordinator --cov=steps --cov=envelope --cov-branch \
	  --cov-report=term-missing:skip-covered $(ARGS)

chaos: $(DEV)  ## all that can go wrong, at length: make chaos ARGS='-k matrix' CHAOS_SEED=1 CHAOS_CELLS=75000
	CHAOS=full $(BIN)/python -m pytest tests/chaos $(ARGS)

e2e: $(DEV)  ## the same cases on real vLLM CPU workers; the first run builds them: make e2e VLLM_VERSION=0.33
	VLLM_VERSION=$(VLLM_VERSION) $(BIN)/python -m pytest -m e2e tests/e2e $(ARGS)

# Huge pages for all that run, and bytecode that is there, as deploy/Dockerfile has it.
bench: export PYTHONDONTWRITEBYTECODE =
bench: export PYTHONMALLOC := malloc
bench: export GLIBC_TUNABLES := glibc.malloc.hugetlb=1
bench: export COORDINATOR_SERVER_HUGE_PAGES := true

bench: $(BENCH)  ## the coordinator beside its peers, 12 minutes: make bench ARGS='--rounds 1 --scenarios chunk'
	$(BIN)/python -m bench.run $(ARGS)

bench-rfc: $(DEV) $(BENCH)  ## who makes text of tokens, and what it costs, within an hour: make bench-rfc ARGS='--budget-s 300'
	$(BIN)/python -m bench.rfc $(ARGS)

bench-peers: $(BENCH)  ## install what make bench compares with, into bench/.peers
	$(BIN)/python -m bench.peers install $(ARGS)

fmt: $(DEV)  ## mend what ruff can mend
	$(BIN)/ruff check --fix .

# No `ruff format --check`: tables of exact dicts and call sites are laid out by hand.
lint: $(DEV)  ## ruff and codespell
	$(BIN)/ruff check .
	$(BIN)/codespell

types: $(DEV)  ## mypy, strict
	$(BIN)/mypy

check: lint types test  ## what a change must pass before it is sent

lock: $(RELEASE)  ## pin what pyproject.toml asks for, in requirements/: make lock ARGS=--upgrade
	PATH=$(abspath $(BIN)):$$PATH scripts/lock $(ARGS)

docs: $(DEV)  ## write the pages that follow from the code: every key, and the diagram of imports
	$(BIN)/python -m scripts.docs

dist: $(RELEASE)  ## wheel, sdist, bill of materials and checksums, in dist/
	PATH=$(abspath $(BIN)):$$PATH scripts/dist

image: | $(BIN)/python  ## do the steps of deploy/Dockerfile without an engine, and start what they make
	$(BIN)/python scripts/image.py

audit: | $(BIN)/python  ## ask the package index whether a pinned package has a known vulnerability
	$(BIN)/python scripts/audit.py $(ARGS)

clean:  ## remove .venv, caches and builds
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage htmlcov
	find coordinator steps envelope tests bench -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] \
	  + ": make PYTHON=python3.12 ..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

# What is installed is what the lock names, by hash; the tree itself comes last, and brings nothing.
define install
$(PIP) install --quiet --require-hashes -r requirements/build.txt $(1:%=-r requirements/%.txt)
$(PIP) install --quiet --no-deps --no-build-isolation -e .
endef

$(DEMO): requirements/demo.txt pyproject.toml | $(BIN)/python
	$(call install,demo)
	@touch $@

# The dev set contains the demo set.
$(DEV): requirements/dev.txt pyproject.toml | $(BIN)/python
	$(call install,dev)
	@touch $(DEMO) $@

$(BENCH): requirements/bench.txt pyproject.toml | $(BIN)/python
	$(call install,bench)
	@touch $@

$(RELEASE): requirements/release.txt pyproject.toml | $(BIN)/python
	$(call install,release)
	@touch $@
