# Each target does its own set-up in .venv and skips it when requirements and packaging have not changed.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# uv reads no pip configuration, so what pip was told about local wheels is passed on.
UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
export UV_FIND_LINKS

.PHONY: train test test-data lint bench bench-envs clean setup

train: setup
	$(BIN)/trial-ray train tuned_examples/alfworld_quickstart.py $(ARGS)

test: setup
	$(BIN)/python -m pytest $(ARGS)

test-data: setup
	$(BIN)/python -m pytest -m data $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	$(BIN)/python benchmarks/run_all.py

bench-envs: setup
	$(BIN)/python benchmarks/run_all.py alfworld webshop

setup: $(STAMP)

$(STAMP): requirements/torch.txt requirements/cpu.txt setup.py envs/setup.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv==0.13.8 --requirement requirements/torch.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --requirement requirements/cpu.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	touch $(STAMP)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
