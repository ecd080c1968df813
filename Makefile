# make demo   the main job, in an environment of its own
# make test   the tests              make test-long  the long sweeps
# make lint   ruff and pyright       make notebooks  run every notebook from a clean kernel
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints/newest.txt
EXTRAS ?= test,notebooks
BIN := $(VENV)/bin

.PHONY: demo test test-long lint notebooks

$(VENV)/installed: pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12) and "dots-jax needs Python 3.12 or newer; name one with make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[$(EXTRAS)]' --constraint $(CONSTRAINTS)
	@touch $@

demo: $(VENV)/installed
	$(BIN)/python -m dots_jax decode

test: $(VENV)/installed
	$(BIN)/python -m pytest

test-long: $(VENV)/installed
	$(BIN)/python -m pytest -m long

lint: $(VENV)/installed
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m pyright --pythonpath $(BIN)/python

notebooks: $(VENV)/installed
	$(BIN)/python notebooks/run.py
