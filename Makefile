# Each target sets up its own virtual environment in $(VENV) if there is none.
VENV ?= .venv
PYTHON ?= python3
# The tested release; asked for by itself first, so that what the machine offers for it (a CPU build, say) is taken.
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin

.PHONY: quickstart test lint typecheck pytest browser benchmarks clean

quickstart: $(VENV)/.train
	$(BIN)/comppo quickstart

test: $(VENV)/.dev lint typecheck pytest

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)"

$(VENV)/.train: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet -e '.[train]'
	touch $@

$(VENV)/.dev: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $@ $(VENV)/.train

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pydoclint src/comppo

typecheck: $(VENV)/.dev
	$(BIN)/mypy

# The inspect page is tested in Chromium, which is installed where that needs no password; without it those tests are
# skipped and say so.
browser:
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit 0; done; \
	{ [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && \
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null; } || \
	echo "no Chromium here: tests of the inspect page in a browser are skipped (apt-get install chromium)"

# The second run has no run-time shape checks, so that comppo's own shape errors are what is tested.
pytest: $(VENV)/.dev browser
	$(BIN)/python -m pytest
	COMPPO_UNHOOKED=1 $(BIN)/python -m pytest -m shapes

benchmarks: $(VENV)/.dev
	$(BIN)/python benchmarks/transport.py

clean:
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
