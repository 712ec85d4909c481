# Each target does its own set-up in .venv and skips it when requirements and packaging have not changed.
# The newest that is there and can make environments; the stub of a version manager may be there and not run.
PYTHON ?= $(shell for python in python3.13 python3.12 python3.11; do $$python -c 'import ensurepip, venv' 2>/dev/null && echo $$python && break; done)
MAKE_VENV = test -n "$(PYTHON)" || { echo "There is no Python 3.11, 3.12 or 3.13 with venv here. Install one, or name it: make PYTHON=/path/to/python"; exit 1; }; $(PYTHON) -m venv
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# What builds the documentation needs none of the rest, and the rest none of it.
DOCS_VENV := .venv-docs
DOCS_STAMP := $(DOCS_VENV)/.installed
# TRL, which the update is compared with, as its own users have it.
BENCH_VENV := .venv-bench
BENCH_STAMP := $(BENCH_VENV)/.installed
# Libraries whose interfaces trial_envs speaks, each in an environment of its own over .venv, since their pins contradict each other.
PEERS := $(basename $(notdir $(wildcard requirements/peers/*.txt)))
# Has CUDA's builds (docs/installation.md), while .venv has the CPU's.
GPU_PYTHON ?= .venv-gpu/bin/python
UV := uv==0.13.8
# uv reads no pip configuration, so what pip was told about local wheels is passed on.
UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
export UV_FIND_LINKS

.PHONY: train test test-data test-faults test-peers test-long test-gpu lint docs bench bench-envs bench-gpu first-gpu-hour gpu-venv clean setup docs-setup bench-setup lock audit

train: setup
	$(BIN)/trial-ray train tuned_examples/alfworld_quickstart.py $(ARGS)

# Two workers, each with a file of tests at a time, which share engines and models (tests/conftest.py).
test: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

test-data: setup
	$(BIN)/python -m pytest -m data $(ARGS)

test-long: setup
	$(BIN)/python -m pytest -m long -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

# HOSTILE_EXAMPLES=10000 draws as many examples of hostile input as each test asks for.
test-faults: setup
	$(BIN)/python -m pytest -m faults -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

# PEERS=openenv runs those of one library.
test-peers: $(PEERS:%=.venv-peers/%/.installed)
	for peer in $(PEERS); do .venv-peers/$$peer/bin/python -m pytest -m peers tests/peers/test_$$peer*.py $(ARGS) || exit 1; done

.venv-peers/%/.installed: requirements/peers/%.txt $(STAMP)
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python .venv-peers/$*
	$(BIN)/uv pip install --quiet --python .venv-peers/$*/bin/python --no-deps --requirement $<
	cd .venv-peers/$*/lib/python3.*/site-packages && echo "import site; site.addsitedir('$$(ls -d $(CURDIR)/$(VENV)/lib/python3.*/site-packages)')" > base.pth
	touch $@

test-gpu:
	$(GPU_PYTHON) -m pytest -m gpu $(ARGS)

# Most Python tokens of a package, and words of README and docs. Whoever takes something away lowers them.
SIZES := \
  trial_ray=229000 \
  tests=203500 \
  benchmarks=28000 \
  words=34000

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy tests/typing/keywords.py
	$(BIN)/lint-imports --no-cache
	$(BIN)/python benchmarks/code_size.py --most $(SIZES)

# Not --quiet: it would keep the warnings from being counted that make a strict build fail.
docs: docs-setup
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build

bench: setup bench-setup
	$(BIN)/python benchmarks/run_all.py $(ARGS)

bench-envs: setup
	$(BIN)/python benchmarks/run_all.py alfworld webshop

bench-gpu:
	$(GPU_PYTHON) benchmarks/gpu.py --json benchmarks/results/gpu

# Doctor, tests and measurements of a GPU; what fails does not keep the next from running. DEVICE=cpu rehearses it in .venv at the
# smallest sizes. WHEELS names a folder of wheels from which a missing GPU_PYTHON is made, without an index.
DEVICE ?= cuda
REHEARSAL := $(filter cpu,$(DEVICE))
OUT ?= $(if $(REHEARSAL),build/first_gpu_hour,benchmarks/results/gpu)
HOUR_PYTHON = $(if $(REHEARSAL),$(BIN)/python,$(GPU_PYTHON))
first-gpu-hour: $(if $(REHEARSAL),setup,gpu-venv)
	export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 RAY_USAGE_STATS_ENABLED=0; failed=0; $(dir $(HOUR_PYTHON))trial-ray doctor || failed=1; \
	$(HOUR_PYTHON) -m pytest $(if $(REHEARSAL),tests/engines/test_engine_conformance.py,-m gpu) || failed=1; \
	$(HOUR_PYTHON) benchmarks/gpu.py $(ARGS) --device $(DEVICE) $(if $(REHEARSAL),--small) --json $(OUT) || failed=1; exit $$failed

gpu-venv:
	@test -x $(GPU_PYTHON) || { test -d "$(WHEELS)" && $(PYTHON) -m venv --system-site-packages $(GPU_PYTHON:/bin/python=) && \
	  $(GPU_PYTHON) -m pip install --quiet --no-index --no-deps $(WHEELS)/*.whl && \
	  $(GPU_PYTHON) -m pip install --quiet --no-index --no-deps --no-build-isolation --editable . ; } || \
	{ echo "There is no $(GPU_PYTHON). Make it as docs/installation.md says, or give a folder of wheels with WHEELS=DIR."; exit 1; }

# Digests of the pinned versions' files, for every platform.
LOCKED := requirements/cpu.txt requirements/docs.txt requirements/bench.txt $(wildcard requirements/peers/*.txt)

lock: setup
	for file in $(LOCKED); do \
	  { grep '^#' $$file; $(BIN)/uv pip compile --quiet --no-deps --generate-hashes --no-header --no-annotate \
	    --python-version 3.11 $$file; } > $$file.new && mv $$file.new $$file || exit 1; \
	done

# Fails where the advisory database knows something of a pinned version, and where it cannot be asked.
audit: setup
	test -x .venv-audit/bin/pip-audit || { $(BIN)/uv venv --quiet .venv-audit && \
	  $(BIN)/uv pip install --quiet --python .venv-audit/bin/python pip-audit==2.10.1; }
	.venv-audit/bin/pip-audit --strict --disable-pip --no-deps $(foreach file,$(LOCKED) requirements/torch.txt,--requirement $(file))

setup: $(STAMP)

$(STAMP): requirements/torch.txt requirements/cpu.txt setup.py envs/setup.py
	@echo "Installing 3.7 GB into $(VENV), which takes some minutes."
	@test -x $(BIN)/python || { $(MAKE_VENV) $(VENV); }
	$(BIN)/python -m pip install --quiet $(UV) --requirement requirements/torch.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --requirement requirements/cpu.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	touch $(STAMP)

docs-setup: $(DOCS_STAMP)

$(DOCS_STAMP): requirements/docs.txt
	@test -x $(DOCS_VENV)/bin/python || { $(MAKE_VENV) $(DOCS_VENV); }
	$(DOCS_VENV)/bin/python -m pip install --quiet $(UV)
	$(DOCS_VENV)/bin/uv pip install --quiet --python $(DOCS_VENV)/bin/python --no-deps --requirement requirements/docs.txt
	touch $(DOCS_STAMP)

bench-setup: $(BENCH_STAMP)

$(BENCH_STAMP): requirements/torch.txt requirements/bench.txt
	@test -x $(BENCH_VENV)/bin/python || { $(MAKE_VENV) $(BENCH_VENV); }
	$(BENCH_VENV)/bin/python -m pip install --quiet $(UV) --requirement requirements/torch.txt
	$(BENCH_VENV)/bin/uv pip install --quiet --python $(BENCH_VENV)/bin/python --no-deps --requirement requirements/bench.txt
	touch $(BENCH_STAMP)

clean:
	rm -rf $(VENV) $(DOCS_VENV) $(BENCH_VENV) .venv-audit .venv-peers build *.egg-info .pytest_cache .mypy_cache .ruff_cache
