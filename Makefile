# Everything a newcomer needs: `make demo` and `make test` set up .venv by themselves and can be run again and again.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: help demo test test-gpu test-all lint format clean

help:
	@echo "make demo      install into .venv and run the demo (CPU, minutes)"
	@echo "make test      install with the dev extra and run the test suite"
	@echo "make test-all  the suite with its slow tail"
	@echo "make test-gpu  operators against their references on a GPU"
	@echo "make lint      ruff and pyright"
	@echo "make format    let ruff format the code"
	@echo "make clean     remove .venv and everything that was built"

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

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python saccade

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) demo build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
