# Everything a person or a machine does with this project, one target each. `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
UV := $(shell command -v uv 2>/dev/null)
WORKERS ?= 2
RESULTS_DIR ?= build/soak

.DEFAULT_GOAL := help
.PHONY: help install demo test lint types format servers integration soak bench settings-doc clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

install: $(VENV)/.installed ## a virtual environment with the locked dependencies and the `tiered` command

# The lock pins every file by hash. The project itself is linked, so an edit is in force at once.
$(VENV)/.installed: requirements.lock pyproject.toml
ifneq ($(UV),)
	test -x $(BIN)/python || $(UV) venv --quiet --python ">=3.11" $(VENV)
	VIRTUAL_ENV="$(abspath $(VENV))" $(UV) pip install --quiet --compile-bytecode --require-hashes -r requirements.lock
	VIRTUAL_ENV="$(abspath $(VENV))" $(UV) pip install --quiet --no-deps -e .
else
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make install PYTHON=python3.11")'
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --require-hashes -r requirements.lock
	$(BIN)/pip install --quiet --no-deps -e .
endif
	@touch $@

demo: install ## a real broker's store: archive it, delete it, read it back, compare
	$(BIN)/python examples/demo.py

test: install ## the fast tests
	$(BIN)/pytest -n $(WORKERS) --dist loadfile -m "not integration and not soak"

lint: install ## style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install ## static types
	$(BIN)/mypy

servers: install ## set up what integration tests run against; what cannot be had is said and skipped later
	$(BIN)/python -m tests.servers.prepare

integration: install ## tests against real servers; what is not reachable is skipped by name
	$(BIN)/pytest -n $(WORKERS) --dist loadfile -m "integration and not soak"

soak: install ## the long runs behind published claims; figures land in $RESULTS_DIR (build/soak) as JSON lines and a table
	mkdir -p "$(RESULTS_DIR)"
	RESULTS_DIR="$(abspath $(RESULTS_DIR))" $(BIN)/pytest -m soak --timeout 7200; \
	code=$$?; \
	$(BIN)/python -m benchmarks.results_table $(RESULTS_DIR)/*.jsonl > $(RESULTS_DIR)/soak.md; \
	cat $(RESULTS_DIR)/soak.md; \
	exit $$code

bench: install ## benchmarks; see benchmarks/
	$(BIN)/python -m benchmarks.offload

format: install ## rewrite the sources in the house style
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

settings-doc: install ## write docs/SETTINGS.md from the declarations
	$(BIN)/python -m tiered.settings.document > docs/SETTINGS.md

clean: ## forget everything built here
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
