# Everything a newcomer needs: `make demo` and `make test` set up .venv by themselves and can be run again and again.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

# The oldest and the newest Python that the suite runs on; pyenv and uv install them under these names.
PYTHON_LOWEST ?= python3.10
PYTHON_NEWEST ?= python3.13
EVERYTHING := '.[dev,scale,fuzz]'
DEFAULT_TIER := -n auto --dist worksteal -m "not slow"

.PHONY: help demo docs test test-gpu test-all test-lowest test-newest coverage constraints lint format clean

help:
	@echo "make demo      install into .venv and run the demo (CPU, minutes)"
	@echo "make test      install with the dev extra and run the test suite"
	@echo "make test-all  run the test suite with the slow tests"
	@echo "make test-gpu  compare operations with their references on a GPU"
	@echo "make test-lowest  the test suite on Python 3.10 with constraints-lowest.txt"
	@echo "make test-newest  the test suite on Python 3.13 with constraints-newest.txt"
	@echo "make coverage  the test suite with line and branch coverage; writes docs/test_coverage.md"
	@echo "make constraints  install the newest versions and write both files of constraints"
	@echo "make docs      build the documentation into docs/_build/html (CPU, minutes)"
	@echo "make lint      ruff, pyright and tools/check_language.py"
	@echo "make format    format the code with ruff"
	@echo "make clean     remove .venv and all build outputs"

$(VENV)/.demo: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt -e '.[train]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(VENV)/.demo
	$(BIN)/saccade demo --out demo

test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(DEFAULT_TIER)

test-gpu: $(VENV)/.dev
	$(BIN)/python -m pytest tests/ops tests/inference

test-all: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

.venv-%/.dev: pyproject.toml constraints-%.txt
	test -x $(@D)/bin/python || $(if $(filter lowest,$*),$(PYTHON_LOWEST),$(PYTHON_NEWEST)) -m venv $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check install -c constraints-$*.txt -e $(EVERYTHING)
	@touch $@

test-lowest test-newest: test-%: .venv-%/.dev
	OMP_NUM_THREADS=1 .venv-$*/bin/python -m pytest $(DEFAULT_TIER)

constraints:
	rm -rf .venv-newest
	$(PYTHON_NEWEST) -m venv .venv-newest
	.venv-newest/bin/python -m pip --disable-pip-version-check install -e $(EVERYTHING)
	.venv-newest/bin/python tools/make_constraints.py --installed constraints-newest.txt

coverage: .venv-newest/.dev
	OMP_NUM_THREADS=1 .venv-newest/bin/python -m pytest $(DEFAULT_TIER) --cov --cov-report=json:build/coverage.json
	.venv-newest/bin/python tools/make_test_coverage.py build/coverage.json

docs: $(VENV)/.dev
	OMP_NUM_THREADS=2 MPLBACKEND=Agg $(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build/html

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/check_language.py
	$(BIN)/pyright --pythonpath $(BIN)/python saccade

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .venv-lowest .venv-newest demo build dist docs/_build docs/examples docs/api/*.rst fuzz-findings *.egg-info .pytest_cache .ruff_cache .hypothesis
