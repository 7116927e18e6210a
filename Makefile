# Every task of this project. `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
UV := $(shell command -v uv 2>/dev/null)
WORKERS ?= 2
RESULTS_DIR ?= build/soak

.DEFAULT_GOAL := help
.PHONY: help install demo test lint types format servers integration soak bench settings-doc docs package clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

install: $(VENV)/.installed ## a virtual environment with the locked dependencies and the `tiered` command

# The lock pins every file by hash. The project itself is linked, so edits take effect immediately.
$(VENV)/.installed: requirements.lock pyproject.toml
ifneq ($(UV),)
	test -x $(BIN)/python || $(UV) venv --quiet --python ">=3.11" $(VENV)
	VIRTUAL_ENV="$(abspath $(VENV))" $(UV) pip install --quiet --compile-bytecode --require-hashes -r requirements.lock
	VIRTUAL_ENV="$(abspath $(VENV))" $(UV) pip install --quiet --no-deps -e .
else
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is required: make install PYTHON=python3.11")'
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --require-hashes -r requirements.lock
	$(BIN)/pip install --quiet --no-deps -e .
endif
	@touch $@

demo: install ## archive a real broker's store, delete it, read it back, compare
	$(BIN)/python examples/demo.py

test: install ## the fast tests
	$(BIN)/pytest -n $(WORKERS) --dist loadfile -m "not integration and not soak"

lint: install ## style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install ## static types
	$(BIN)/mypy

servers: install ## install the servers of integration tests; report those that cannot be installed
	$(BIN)/python -m tests.servers.prepare

integration: install ## tests against real servers; unavailable ones are skipped by name
	$(BIN)/pytest -n $(WORKERS) --dist loadfile -m "integration and not soak"

soak: install ## the long tests behind published results; figures go to $RESULTS_DIR (build/soak)
	mkdir -p "$(RESULTS_DIR)"
	RESULTS_DIR="$(abspath $(RESULTS_DIR))" $(BIN)/pytest -m soak --timeout 7200; \
	code=$$?; \
	$(BIN)/python -m benchmarks.results_table $(RESULTS_DIR)/*.jsonl > $(RESULTS_DIR)/soak.md; \
	cat $(RESULTS_DIR)/soak.md; \
	exit $$code

bench: install ## the offload benchmark; more in benchmarks/
	$(BIN)/python -m benchmarks.offload

format: install ## format the sources
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

settings-doc: install ## write docs/SETTINGS.md from the declarations
	$(BIN)/python -m tiered.settings.document > docs/SETTINGS.md

package: install ## wheel and sdist in dist/, and a check of the wheel in a clean environment
	$(BIN)/python .ci/package.py

DOCS_BIN := build/docs-venv/bin
SITE_FILES = README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md LICENSE

docs: build/docs-venv/.installed ## the documentation site with the API reference, in build/site
	rm -rf build/site-source && mkdir -p build/site-source
	cp -r --parents $(SITE_FILES) docs deploy examples/*.py build/site-source
	NO_MKDOCS_2_WARNING=1 $(DOCS_BIN)/mkdocs build --quiet --strict --config-file mkdocs.yml

build/docs-venv/.installed: requirements-docs.lock
ifneq ($(UV),)
	$(UV) venv --quiet --clear --python ">=3.11" build/docs-venv
	VIRTUAL_ENV="$(abspath build/docs-venv)" $(UV) pip install --quiet --require-hashes -r requirements-docs.lock
else
	$(PYTHON) -m venv --clear build/docs-venv
	$(DOCS_BIN)/pip install --quiet --require-hashes -r requirements-docs.lock
endif
	@touch $@

clean: ## delete everything built here
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
