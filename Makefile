# Every target sets up .venv by itself on first use. Needs make and Python 3.11 or newer.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed
CODE := minigpt_jax tests benchmarks examples

.DEFAULT_GOAL := help
.PHONY: help install demo test slow parity lint format bench clean

help: ## say what the targets do
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(INSTALLED) ## make .venv and install the package, editable, with all that demo and test need

$(INSTALLED): setup.cfg pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed, this is %s: make PYTHON=python3.12 ..." % sys.version.split()[0])'
	@echo "setting up .venv (once, about a minute)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[plot,bpe,test]'
	@touch $@

demo: $(INSTALLED) ## train the course's Mini-GPT on Shakespeare, read it, look inside: about two minutes
	@$(BIN)/minigpt params configs/minigpt.yaml
	@echo
	@if [ -f runs/demo/config.yaml ]; then $(BIN)/minigpt train runs/demo; \
	else $(BIN)/minigpt train configs/minigpt.yaml --run-dir runs/demo; fi
	@echo
	@$(BIN)/minigpt eval runs/demo
	@echo
	@echo "--- it writes:"
	@$(BIN)/minigpt sample runs/demo --prompt "ROMEO:"
	@echo
	@echo "--- what it would say after each layer:"
	@$(BIN)/minigpt lens runs/demo --prompt "To be, or not to be"
	@echo
	@echo "--- the two uses of its one table:"
	@$(BIN)/minigpt grads runs/demo --rows 8
	@echo
	@$(BIN)/minigpt report runs/demo

test: $(INSTALLED) ## run the tests (those of the HTML page need Chromium on the PATH)
	@$(BIN)/python -m pytest -n 2 --dist loadfile -m "not parity and not slow"

slow: $(INSTALLED) ## run the slow tests: the README's commands, the examples, whole runs
	@$(BIN)/python -m pytest -n 2 --dist loadfile -m slow

parity: $(INSTALLED) ## compare with transformers on torch (installs both)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[parity]'
	@$(BIN)/python -m pytest -m parity

lint: $(INSTALLED) ## check style
	@$(BIN)/ruff check $(CODE) && $(BIN)/ruff format --check $(CODE)

format: $(INSTALLED) ## mend style
	@$(BIN)/ruff check --fix $(CODE) && $(BIN)/ruff format $(CODE)

bench: $(INSTALLED) ## measure speed beside transformers (and NANOGPT=folder), an hour or two, and what looking inside costs
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[parity]'
	@$(BIN)/minigpt bench --configs S C C2 G G1k --rounds 5 $(if $(NANOGPT),--nanogpt "$(NANOGPT)") --out benchmarks/results.md
	@$(BIN)/python benchmarks/inspecting.py --config S C

clean: ## remove .venv and caches; runs/ stays
	@rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
