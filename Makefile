# `make demo` from a fresh clone installs everything into .venv and runs a small federation.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

# Two workers on two cores: one thread each, or they fight.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
PYTEST := -m pytest -n 2 --dist loadfile
QUICK := "not slow and not gpu and not network"

# The share of lines and branches that the tests covered last, in per cent, rounded down. It may only rise.
COVERED := 96

.DEFAULT_GOAL := help
.PHONY: help venv demo demo-network test test-slow test-lowest coverage lint format docs architecture bench bench-quick \
	try-minimal try-wheel clean

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 15

venv: .venv/.stamp ## Install Collegium and its developer tools into .venv

.venv/.stamp: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Collegium needs Python 3.11 or newer; name one: make PYTHON=python3.11" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv \
		|| { $(PYTHON) -m pip install --quiet --target .bootstrap virtualenv \
			&& PYTHONPATH=.bootstrap $(PYTHON) -m virtualenv --quiet --clear .venv; } \
		|| { echo "No virtual environment could be made; on Debian: apt-get install python3-venv" >&2; exit 1; }
	$(PIP) install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

.venv/.stamp-docs: .venv/.stamp
	$(PIP) install --quiet -c constraints.txt -e '.[dev,docs]'
	@touch $@

demo: .venv/.stamp ## Draw a phantom federation, train on it and write a report
	$(BIN)/collegium demo

demo-network: .venv/.stamp ## Train between a server and three hospitals, processes over mutual TLS, and write a report
	$(BIN)/collegium federation demo

test: .venv/.stamp ## Run the tests that need neither time, a GPU nor a network
	$(TEST_ENV) $(BIN)/python $(PYTEST) -m $(QUICK)

test-slow: .venv/.stamp ## Run the slow tests
	$(TEST_ENV) $(BIN)/python $(PYTEST) -m "slow and not gpu and not network"

# Old versions may use what newer ones have deprecated since.
test-lowest: build/lowest/.stamp ## Run the tests with the lowest versions that pyproject.toml allows
	$(TEST_ENV) build/lowest/bin/python $(PYTEST) -W default::DeprecationWarning -m $(QUICK)

build/lowest/.stamp: pyproject.toml
	$(PYTHON) -m venv --clear build/lowest
	build/lowest/bin/python -m pip install --quiet uv
	build/lowest/bin/uv pip install --quiet --python build/lowest/bin/python --resolution lowest-direct -e '.[dev]'
	@touch $@

coverage: .venv/.stamp ## Run the tests and fail if they cover less of the package than they did
	$(TEST_ENV) $(BIN)/python $(PYTEST) -m $(QUICK) --cov --cov-report=term:skip-covered --cov-fail-under=$(COVERED)

lint: .venv/.stamp ## Check style, types, layers and spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	MYPYPATH=src:benchmarks $(BIN)/mypy --follow-imports silent benchmarks/*.py docs
	$(BIN)/lint-imports --no-cache
	$(BIN)/codespell

format: .venv/.stamp ## Format the code and mend what ruff can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: .venv/.stamp-docs ## Build the documentation into site/, warnings being errors
	NO_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --strict --quiet

architecture: .venv/.stamp ## Draw docs/architecture.svg from the imports
	$(BIN)/python docs/draw_architecture.py

bench: .venv/.stamp ## Run the benchmarks; each ends with its figure and "ok" or "short"
	@for script in benchmarks/*.py; do $(BIN)/python $$script $(BENCH) || failed=1; done; exit $${failed:-0}

bench-quick: ## Run the benchmarks at their small sizes
	@$(MAKE) --no-print-directory bench BENCH=--quick

try-minimal: ## Install without extras and run the toy federation
	$(PYTHON) -m venv --clear build/minimal
	build/minimal/bin/python -m pip install --quiet -c constraints.txt .
	build/minimal/bin/collegium check fedavg

try-wheel: .venv/.stamp ## Build into dist/, and install the wheel where nothing else is
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(PYTHON) -m venv --clear build/wheel
	build/wheel/bin/python -m pip install --quiet -c constraints.txt dist/*.whl
	build/wheel/bin/collegium --help

clean: ## Remove what the tools wrote; .venv, runs and data stay
	rm -rf build dist site .bootstrap .coverage .coverage.* htmlcov .hypothesis .import_linter_cache .mypy_cache \
		.pytest_cache .ruff_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
