# Set-up and the handful of commands of this project; see CONTRIBUTING.md.
VENV ?= .venv
PYTHON ?= python3
SEEDS ?= 0
BIN := $(VENV)/bin
EXTRAS ?= test

.PHONY: demo test lint bench clean

# Rebuilt when the project's requirements change.
$(VENV)/.installed-%: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.[$*]'
	touch $@

demo: $(VENV)/.installed-test  ## OCT-FedSIR against FedAvg on one phantom federation; more seeds: make demo SEEDS=0-4
	$(BIN)/fedsir compare demo --methods oct_fedsir,fedavg --seeds $(SEEDS)

test: $(VENV)/.installed-test  ## the whole default suite
	$(BIN)/python -m pytest

lint: $(VENV)/.installed-dev  ## format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(VENV)/.installed-test  ## slow and statistical checks
	$(BIN)/python -m pytest -m slow

clean:
	rm -rf $(VENV) build dist
