# Every command makes the environment that it needs in .venv first, so each works in a fresh clone.
#
#   make demo                   see it work: a real worker, a real beat, no server needed
#   make test                   everything that CI runs
#   make test TESTS=tests/unit  style, types and floors, then these tests only
#
# PYTHON chooses the interpreter that the environment is made with: make demo PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Test processes. The slow tests wait for real workers most of the time, so three keep two cores busy.
WORKERS ?= 3
TESTS ?= tests
SEEDS ?= 1000
MINUTES ?= 5

.DEFAULT_GOAL := help
.PHONY: help demo test lint pytest benchmark simulate chaos environment clean distclean
.DELETE_ON_ERROR:

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.installed-for-demo ## run the example shop on SQLite and files, and watch it
	$(BIN)/python -m example.demo

test: lint pytest ## check style, types and floors, then run all tests (WORKERS, TESTS)

lint: environment ## check style, types and the floors of the package
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

pytest: environment ## run all tests, without the checks
	$(BIN)/python -m pytest --numprocesses=$(WORKERS) --dist=worksteal $(TESTS)

benchmark: environment ## measure, beside bare Celery in the same run (ARGS)
	$(BIN)/python -m benchmarks $(ARGS)

simulate: environment ## run the protocol under a simulated world (SEEDS, ARGS)
	$(BIN)/python -m tests.simulation --seeds $(SEEDS) $(ARGS)

chaos: environment ## kill real processes for a while and check what they did (MINUTES, ARGS)
	$(BIN)/python -m tests.chaos --minutes $(MINUTES) $(ARGS)

environment: $(VENV)/.installed-for-tests ## make .venv with everything that tests and benchmarks need

clean: ## remove what builds, checks and the demo have left
	rm -rf build dist .demo .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## remove .venv too
	rm -rf $(VENV)

# pip learned dependency groups in 25.1; the one that comes with Python can be older.
$(VENV)/.pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "$(PYTHON) is older than Python 3.10; name another one: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	touch $@

$(VENV)/.installed-for-demo: pyproject.toml | $(VENV)/.pip
	$(BIN)/python -m pip install --quiet --editable '.[demo]'
	touch $@

$(VENV)/.installed-for-tests: pyproject.toml | $(VENV)/.pip
	$(BIN)/python -m pip install --quiet --editable '.[postgresql,mysql,redis,flower,prompts,demo]' --group test
	touch $@
