# Everything runs in a virtual environment of its own; it is made on first use.
VENV := .venv
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.ready

.PHONY: demo test bench lint clean help

help:
	@echo "make demo   beam search on real code prompts, measured (a first run sets everything up)"
	@echo "make test   linters, type checks and all tests"
	@echo "make lint   linters and type checks alone"
	@echo "make bench  the tables of the README, about five minutes"
	@echo "make clean  remove the virtual environment and caches"

demo: $(READY)
	$(PYTHON) -m benchmarks.demo

test: $(READY) lint
	$(PYTHON) -m pytest

lint: $(READY)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

bench: $(READY)
	$(PYTHON) -m benchmarks.run

$(READY): pyproject.toml tools/set_up.py
	python3 tools/set_up.py $(VENV)
	@touch $(READY)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
