# Everything starts here: `make demo` and `make test` need nothing but Python 3.10 or newer.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
# Processes that run tests, each with one thread. They take work from each other, so that both end at the same time, and
# tests of one file mostly stay together, with what they share.
WORKERS ?= 2
PYTEST := $(RUN) -m pytest -n $(WORKERS) --dist worksteal
# Python compiles what is imported, a third of what is installed, and keeps that: tests start many processes.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-all lint types unit clean

demo: $(READY)
	$(RUN) -m natgrad compare digits

test: lint types unit

test-all: lint types
	$(PYTEST) -m ""

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

types: $(READY)
	$(RUN) -m mypy

unit: $(READY)
	$(PYTEST)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "natgrad needs Python 3.10 or newer")'
	@echo "Setting up a virtual environment with torch and the rest, once: a few minutes."
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
