# Every task of this project. `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
UV := $(or $(shell command -v uv 2>/dev/null),$(BIN)/uv)
# One more than the cores of a small machine: tests wait for servers, limits of time, and the disk.
WORKERS ?= 3
RESULTS_DIR ?= build/soak
# Tests start hundreds of processes: none compiles what another one has compiled.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
SHIPPED := tiered uploader fetcher rocketmq_tiered
.PHONY: help install demo test lint audit types format servers integration soak bench settings-doc docs package lock clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

install: $(VENV)/.installed ## a virtual environment with the locked dependencies and the `tiered` command

# The locks pin every file by hash. The project itself is linked, so edits take effect immediately.
$(VENV)/.installed: requirements.lock $(VENV)/.runtime
	$(call install_locked,$(VENV),-r requirements.lock)
	@touch $@

# What the `tiered` command needs, without Spark and development tools.
$(VENV)/.runtime: requirements-runtime.lock requirements-build.lock pyproject.toml | $(UV)
	test -x $(BIN)/python || $(UV) venv --quiet --python ">=3.11" $(VENV)
	$(call install_locked,$(VENV),-r requirements-runtime.lock -r requirements-build.lock)
	VIRTUAL_ENV="$(abspath $(VENV))" $(UV) pip install --quiet --no-deps --no-build-isolation -e . || \
	    $(BIN)/pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

# Installs in a tenth of pip's time. pip does it where uv cannot be had or does not reach the package index.
$(VENV)/bin/uv:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is required: make install PYTHON=python3.11")'
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	-$(BIN)/pip install --quiet --require-hashes -r requirements-uv.lock
install_locked = VIRTUAL_ENV="$(abspath $(1))" $(UV) pip install --quiet --require-hashes $(2) || \
    $(1)/bin/pip install --quiet --require-hashes $(2)

# Compiled once, for every process of tests and demo.
$(VENV)/.kernels: $(wildcard tiered/kernels/*.py) $(VENV)/.runtime
	rm -rf tiered/kernels/__pycache__/ahead-*
	$(BIN)/tiered compile
	@touch $@

demo: $(VENV)/.kernels ## archive a real broker's store, delete it, read it back, compare
	$(BIN)/python examples/demo.py

test: install $(VENV)/.kernels ## the fast tests
	$(BIN)/pytest -n $(WORKERS) --dist loadfile -m "not integration and not soak"

lint: install ## style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

audit: build/audit-venv/.installed ## unsafe calls in the sources, known vulnerabilities of locked versions
	build/audit-venv/bin/bandit --quiet --configfile pyproject.toml --recursive $(SHIPPED)
	build/audit-venv/bin/python .ci/audit.py $(AUDIT_OPTIONS)
	build/audit-venv/bin/cyclonedx-py requirements requirements-runtime.lock --pyproject pyproject.toml \
	    --mc-type application --output-reproducible --of JSON -o build/sbom.json

types: install ## static types
	$(BIN)/mypy

servers: install ## install the servers of integration tests; report those that cannot be installed
	$(BIN)/python -m tests.servers.prepare

# Of these, `.ci/run` has time for a slice: SLICE="and not extended".
SLICE ?=
integration: install $(VENV)/.kernels ## tests against real servers; unavailable ones are skipped by name
	$(BIN)/pytest -n $(WORKERS) --dist loadfile -m "integration and not soak $(SLICE)"

soak: install $(VENV)/.kernels ## the long tests behind published results; figures go to $RESULTS_DIR (build/soak)
	mkdir -p "$(RESULTS_DIR)"
	RESULTS_DIR="$(abspath $(RESULTS_DIR))" $(BIN)/pytest -m soak --timeout 7200; \
	code=$$?; \
	$(BIN)/python -m benchmarks.results_table $(RESULTS_DIR)/*.jsonl > $(RESULTS_DIR)/soak.md; \
	cat $(RESULTS_DIR)/soak.md; \
	exit $$code

bench: install $(VENV)/.kernels ## the offload benchmark; more in benchmarks/
	$(BIN)/python -m benchmarks.offload

format: install ## format the sources
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

settings-doc: install ## write docs/SETTINGS.md from the declarations, docs/OPTIONS.md and share/ from the command line
	$(BIN)/python -m tests.settings.settings_document > docs/SETTINGS.md
	$(BIN)/python -m tests.shared_files

package: install ## wheel and sdist in dist/, and a check of the wheel in a clean environment
	$(BIN)/python .ci/package.py

DOCS_BIN := build/docs-venv/bin
SITE_FILES = README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md LICENSE

docs: build/docs-venv/.installed ## the documentation site with the API reference, in build/site
	rm -rf build/site-source && mkdir -p build/site-source
	cp -r --parents $(SITE_FILES) docs deploy examples/*.py build/site-source
	NO_MKDOCS_2_WARNING=1 $(DOCS_BIN)/mkdocs build --quiet --strict --config-file mkdocs.yml

# Tools with a lock of their own get an environment of their own.
build/%-venv/.installed: requirements-%.lock | $(UV)
	$(UV) venv --quiet --clear --python ">=3.11" $(@D) || $(PYTHON) -m venv --clear $(@D)
	$(call install_locked,$(@D),-r $<)
	@touch $@

# The smaller locks have the versions of requirements.lock. `make lock UPGRADE=--upgrade` updates all.
LOCK = $(UV) pip compile --quiet --generate-hashes --no-header --no-annotate --python-version 3.11 $(UPGRADE)
lock: | $(UV) ## rewrite the lock files after a change of the dependencies in pyproject.toml
	$(LOCK) --all-extras pyproject.toml -o requirements.lock
	mkdir -p build && sed -nE 's/^([A-Za-z0-9].*[^ ]) *\\$$/\1/p' requirements.lock > build/constraints.txt
	$(LOCK) -c build/constraints.txt pyproject.toml -o requirements-runtime.lock
	$(LOCK) -c build/constraints.txt --group build -o requirements-build.lock
	$(LOCK) --group uv -o requirements-uv.lock
	$(LOCK) --group audit -o requirements-audit.lock
	$(LOCK) --group docs -o requirements-docs.lock

clean: ## delete everything built here
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
