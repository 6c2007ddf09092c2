# Everything a newcomer needs: `make demo` and `make test` set up .venv by themselves and can be run again and again.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: help demo docs test test-gpu test-all lint format clean

help:
	@echo "make demo      install into .venv and run the demo (CPU, minutes)"
	@echo "make test      install with the dev extra and run the test suite"
	@echo "make test-all  run the test suite with the slow tests"
	@echo "make test-gpu  compare operations with their references on a GPU"
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
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal -m "not slow"

test-gpu: $(VENV)/.dev
	$(BIN)/python -m pytest tests/ops tests/inference

test-all: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

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
	rm -rf $(VENV) demo build dist docs/_build docs/examples docs/api/*.rst *.egg-info .pytest_cache .ruff_cache .hypothesis
