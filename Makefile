# Two commands do everything: `make run` (the quickstart campaign) and `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: help run test slow check simulate system-packages clean

help:            ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 24

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	@touch $@

run: $(READY)    ## run the quickstart: a real campaign of real MD, about two minutes
	$(BIN)/mdcampaign run configs/quickstart.yaml

simulate: $(READY)  ## the demo mode: no MD, seconds
	$(BIN)/mdcampaign simulate --workload tutorial

system-packages: ## install the programs that tests use, where this user may (Debian or Ubuntu, root)
	@sh tests/system-packages.sh

test: $(READY) system-packages  ## install what the tests need, and run them
	$(BIN)/python -m pytest

slow: $(READY) system-packages  ## the tests that take minutes
	$(BIN)/python -m pytest -m slow

check: $(READY)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:           ## remove the environment and what tools left
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache runinfo
