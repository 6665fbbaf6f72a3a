# Every target makes the virtual environment first, with the first Python >= 3.12 that scripts/find-python finds.
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
JOBS ?= 2

.PHONY: demo test lint types docs clean

demo: $(INSTALLED)
	$(BIN)/xgpuzarr demo

test: $(INSTALLED)
	$(BIN)/python -m pytest --numprocesses $(JOBS) --timeout 600 $(PYTEST_ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(INSTALLED)
	$(BIN)/mypy

docs: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(BIN)/mkdocs build --strict

$(INSTALLED): pyproject.toml constraints.txt
	python=$$(scripts/find-python) && "$$python" -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist demo-output site .pytest_cache .mypy_cache .ruff_cache .hypothesis
