# `make demo` and `make test` do all the set-up, on a machine with Python and make only.
PYTHON ?= python3
BIN := .venv/bin
TORCH ?= 2.15.0
BESIDE := PYTHONPATH=.venv/integrations XDG_CACHE_HOME=$(CURDIR)/.venv/integrations/cache

.PHONY: demo test test-compiled test-torch test-integrations lint bench docs docs-look package clean

demo: .venv/ready
	$(BIN)/fusedstep demo

# two processes, by files, whatever the machine: many tests start processes of their own, one takes 15 GiB
test: .venv/ready
	$(BIN)/python -m pytest -n 2 --dist loadfile

# kernels as they are compiled for an H200, run by tests/ptx.py: all tests of the triton engine in five minutes, or
# ten with an empty ~/.triton; make test-compiled TESTS=tests/test_clip.py to run only that
test-compiled: .venv/ready
	TRITON_INTERPRET=0 $(BIN)/python -m pytest -n 2 --dist loadfile -k triton $(TESTS)

# the suite with another torch, by hand: make test-torch TORCH=2.11.0; TESTS=tests/test_clip.py to run only that
test-torch: .venv-torch-$(TORCH)/ready
	.venv-torch-$(TORCH)/bin/python -m pytest -n 2 --dist loadfile $(TESTS)

# our optimizers in other people's trainers, with the versions in requirements-integrations.txt
test-integrations: .venv/integrations/ready
	$(BESIDE) $(BIN)/python -m pytest -n 2 --dist loadfile tests/integrations

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/ready
	$(BIN)/fusedstep bench

# every page anew, so that no warning is seen only once; then open docs/_build/html/index.html
docs: .venv/docs
	$(BIN)/python docs/performance.py
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --fresh-env --quiet docs docs/_build/html

# wheel and sdist, for a release; tests/commands/test_package.py looks into both
package: .venv/ready
	rm -rf dist
	$(BIN)/python -m build --no-isolation

# the built site in a browser, by hand: needs chromium; prints where its pictures are
docs-look: .venv/docs
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[look]'
	$(BIN)/python docs/look.py

# the last line marks the environment complete: an interrupted set-up starts over, a complete one needs no network
.venv/ready: pyproject.toml requirements-dev.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[cli,test]'
	touch $@

# PyPI's torch, which brings CUDA (5 GB, and no GPU is needed) and its own Triton, whose interpreter does not know
# numpy 2.4 before version 3.7
.venv-torch-%/ready: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check torch==$* 'numpy<2.4' -e '.[cli,test]'
	touch $@

# nothing is resolved, so nothing can replace torch; and in a folder of their own, where other tests do not see them:
# with torchvision there, Lightning imports it, which fails beside a CPU build of torch. yapf fills a cache when it is
# first imported, and the file is empty for a moment: here, so that no two tests do it at once
.venv/integrations/ready: .venv/ready requirements-integrations.txt
	rm -rf $(@D)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(@D) \
		-r requirements-integrations.txt
	$(BESIDE) $(BIN)/python -c 'import yapf'
	touch $@

.venv/docs: .venv/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	touch $@

clean:
	rm -rf .venv .venv-torch-* dist
