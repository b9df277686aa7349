# Set-up and the handful of commands of this project; see CONTRIBUTING.md.
VENV ?= .venv
PYTHON ?= python3
SEEDS ?= 0
STUDY_SEEDS ?= 0-2
REPETITIONS ?= 20
BIN := $(VENV)/bin
EXTRAS ?= test

.PHONY: demo test lint bench bench-speed bench-faults bench-soak bench-identification clean

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

bench-speed: $(VENV)/.installed-test  ## what a run costs beside a bare PyTorch loop, growth, memory, start; idle machine
	mkdir -p fedsir-runs
	$(BIN)/fedsir bench --json fedsir-runs/bench.json

bench-faults: $(VENV)/.installed-test  ## kills, hangs, full disks at random times: outcomes, repeated work; hours
	$(BIN)/python tests/faults/table.py --repetitions $(REPETITIONS)

bench-soak: $(VENV)/.installed-test  ## 500 short runs in one sweep: memory, open files, threads, object store
	$(BIN)/python tests/faults/soak.py

bench-identification: $(VENV)/.installed-test  ## Table 2 on phantoms: 13 noise settings, 3 alphas, 30/20/5 clients; an hour
	for cohort in kermany uic wake_forest; do \
	  $(BIN)/fedsir study identification rehearsal_$$cohort --methods fedsir,oct_fedsir --seeds $(STUDY_SEEDS) || exit; \
	done

clean:
	rm -rf $(VENV) build dist
