# `make demo` and `make test` do all the set-up, on a machine with Python and make only.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint bench docs clean

demo: .venv/ready
	$(BIN)/fusedstep demo

# two processes, by files, whatever the machine: many tests start processes of their own, one takes 15 GiB
test: .venv/ready
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/ready
	$(BIN)/fusedstep bench

# every page anew, so that no warning is seen only once; then open docs/_build/html/index.html
docs: .venv/docs
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --fresh-env --quiet docs docs/_build/html

# the last line marks the environment complete: an interrupted set-up starts over, a complete one needs no network
.venv/ready: pyproject.toml requirements-dev.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[cli,test]'
	touch $@

.venv/docs: .venv/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	touch $@

clean:
	rm -rf .venv
