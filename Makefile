# Each target sets up what it needs; a second run starts at once.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

BIN := .venv/bin
SOURCES := contract processor smtp_agent testbed tests benchmarks docs

# Python and Debian packages, and the project itself, installed once for each lock file.
.venv/installed: requirements.lock pyproject.toml testbed/setup.sh
	@testbed/setup.sh
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "python3 is older than 3.11: install Python 3.11 or newer" >&2; exit 2; }
	@echo "installing Python packages into .venv" >&2
	@test -x $(BIN)/python || python3 -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

.PHONY: setup
setup: .venv/installed
	@testbed/setup.sh

.PHONY: demo
demo: setup ## Campaigns through real Kafka, Postgres and Postfix, on this machine (KEEP=1 leaves it running)
	@$(BIN)/python -m testbed.demo $(if $(KEEP),--keep)

.PHONY: test
test: setup lint ## All tests, on real services (LONG=1: those too that take minutes each)
	@$(BIN)/python -m pytest -n $(or $(PROCESSES),3) $(if $(LONG),-m "long or not long") \
	  tests/chaos tests/acceptance tests/integration tests/unit

.PHONY: chaos
chaos: setup ## kill -9 while mail flows, and every promise checked (ONLY=processor or agent, SEED=n, SEEDS=n in a row)
	@$(BIN)/python -m testbed.chaos $(if $(ONLY),--only $(ONLY)) $(if $(SEED),--seed $(SEED)) $(if $(SEEDS),--seeds $(SEEDS))

.PHONY: bench
bench: setup ## Benchmarks as ratios measured in one run (ONLY=name for one of them)
	@$(BIN)/python -m benchmarks $(ONLY)

.PHONY: lint
lint: setup ## ruff and mypy --strict
	@$(BIN)/ruff format --check --quiet $(SOURCES) || { $(BIN)/ruff format --diff $(SOURCES); exit 1; }
	@$(BIN)/ruff check --quiet $(SOURCES)
	@$(BIN)/mypy

.PHONY: format
format: setup ## Format and mend what ruff can
	@$(BIN)/ruff format $(SOURCES)
	@$(BIN)/ruff check --fix $(SOURCES)

.PHONY: docs
docs: setup ## What of docs/ is made from the code: metrics, the reference of the commands, the schemas of the events
	@$(BIN)/python -m docs.metrics
	@$(BIN)/python -m docs.commands
	@$(BIN)/python -m contract.schemas docs/events

.PHONY: lock
lock: setup ## Exact versions anew, from the ranges in pyproject.toml
	@$(BIN)/pip-compile --quiet --upgrade --all-extras --generate-hashes --allow-unsafe --strip-extras \
	  --no-emit-index-url --no-emit-find-links --output-file requirements.lock pyproject.toml

.PHONY: audit
audit: ## Known vulnerabilities of what is locked, by pip-audit where it is on PATH and its data can be reached
	@command -v pip-audit >/dev/null || { echo "audit: pip-audit is not on PATH: pipx install pip-audit" >&2; exit 2; }
	@python3 -c 'import urllib.request as r; r.urlopen("https://pypi.org/pypi/pip/json", timeout=10)' 2>/dev/null \
	  || { echo "audit: nothing was checked: pypi.org, where pip-audit has its data from, is not reached from here" >&2; exit 1; }
	@pip-audit --require-hashes --disable-pip --progress-spinner off --requirement requirements.lock

.PHONY: clean
clean: ## Everything that was made here; caches outside the work tree stay
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage dist
	find $(SOURCES) -name __pycache__ -prune -exec rm -rf {} +

.PHONY: help
help:
	@grep -E '^[a-z]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 10
