# `make demo` and `make test` do all their set-up on a fresh machine and are quick the second time.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: help demo federation test processes matrix slow lint format types contract check bench fuzz audit hashed lock licences clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

$(VENV)/installed: pyproject.toml constraints.txt
	@echo "setting up $(VENV) (once, about a minute)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) --editable .
	@touch $@

$(VENV)/installed-flower: $(VENV)/installed
	@$(PIP) --editable '.[flower]'
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	@$(PIP) --editable '.[dev]'
	@touch $@

demo: $(VENV)/installed  ## compare seven methods on digits: table, curves, page
	@$(BIN)/feddpc compare --data digits --clients 100 --cohort 10 --alpha 0.2 --rounds 60 --seeds 0,1

federation: $(VENV)/installed-flower  ## train in a real federation of four nodes on this machine, over TLS
	@$(BIN)/feddpc federate demo --nodes 4 --tls

test: $(VENV)/installed-dev  ## run the test suite
	@$(BIN)/python -m pytest -q -n auto --dist worksteal

processes: $(VENV)/installed-dev  ## test federations of real processes, in Flower's simulation and deployment
	@$(BIN)/python -m pytest -q -n 2 --dist loadfile -m 'processes and not slow'

matrix: $(VENV)/installed-dev  ## run the tests over Flower once per supported release of it, real processes included
	@$(BIN)/python tools/flower_matrix.py

slow: $(VENV)/installed-dev  ## run the tests that take minutes: every kill point, long drifts, restarts of federations
	@$(BIN)/python -m pytest -q -m slow

lint: $(VENV)/installed-dev  ## check style and formatting
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

format: $(VENV)/installed-dev  ## format the code
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

types: $(VENV)/installed-dev  ## check types, strictly
	@$(BIN)/mypy

contract: $(VENV)/installed-dev  ## check that imports follow the way of the data
	@$(BIN)/lint-imports

check: test processes lint types contract  ## everything CI checks

bench: $(VENV)/installed  ## measure this machine against a plain eager loop
	@$(BIN)/feddpc bench --against eager

MINUTES ?= 1
fuzz: $(VENV)/installed-dev  ## fuzz every reader: MINUTES=60 in all, or RUNS=2000 inputs each, which is repeatable
	@PYTHONHASHSEED=0 $(BIN)/python tests/fuzz/everything.py $(if $(RUNS),--runs $(RUNS),--minutes $(MINUTES))

audit: $(VENV)/installed-dev  ## look up pinned versions in a database of vulnerabilities on this machine
	@$(BIN)/python tools/audit.py

hashed:  ## set up the environment with every file checked against requirements-ci.txt; for CI, before the others
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip --disable-pip-version-check install --quiet --require-hashes --no-deps --requirement requirements-ci.txt

lock: $(VENV)/installed-dev  ## write requirements-ci.txt again after constraints.txt has changed
	@$(BIN)/python tools/lock.py

licences: $(VENV)/installed-dev  ## write docs/licences.md again after constraints.txt has changed
	@$(BIN)/python tools/licences.py

clean:  ## remove the environment and caches
	@rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
