# make demo        the main job: the released model's sliding layers decode a workload
# make test        the tests                make test-long      the long sweeps
# make lint        ruff and pyright         make notebooks      run every notebook from a clean kernel
# make kernel-report   compile the Hopper kernels, no GPU needed, and test the report itself
# make wheel       install the wheel into a folder of its own and run it from there
#
# Each makes the environment it needs. CONSTRAINTS=constraints/oldest.txt picks the oldest supported jax.
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints/newest.txt
BIN := $(VENV)/bin
# The CUDA compiler takes 1.5 GB, so it has an environment of its own.
KERNEL_VENV := $(VENV)-kernel-report

.PHONY: demo test test-long lint notebooks kernel-report wheel

define install
	@$(PYTHON) -c 'import sys; sys.exit("dots-jax needs Python 3.12 or newer: make PYTHON=..." if sys.version_info < (3, 12) else 0)'
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --editable '.[$(EXTRAS)]' --constraint $(CONSTRAINTS)
	@touch $@
endef

$(VENV)/installed: EXTRAS := test,notebooks,docs
$(VENV)/installed: pyproject.toml $(CONSTRAINTS)
	$(install)

$(KERNEL_VENV)/installed: EXTRAS := kernel-report,test
$(KERNEL_VENV)/installed: pyproject.toml $(CONSTRAINTS)
	$(install)

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

wheel: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(VENV)/wheel .
	cd $(VENV)/wheel && ls dots_jax/py.typed pallas_kernels/py.typed && ../bin/python -m dots_jax info

kernel-report: $(KERNEL_VENV)/installed
	$(KERNEL_VENV)/bin/python -m dots_jax kernel-report --jobs 2
	$(KERNEL_VENV)/bin/python -m pytest tests/kernels/test_report_compile.py
