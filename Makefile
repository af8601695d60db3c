# `make demo` and `make test` do all the set-up, on a machine with Python and make only: the demo what the commands
# need, the tests more.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := python -m pip install --quiet --disable-pip-version-check
TORCH ?= 2.15.0
BESIDE := PYTHONPATH=.venv/integrations XDG_CACHE_HOME=$(CURDIR)/.venv/integrations/cache

.PHONY: demo test test-compiled test-torch test-integrations lint bench docs docs-look package clean

demo: .venv/commands
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

bench: .venv/commands
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
	$(BIN)/$(INSTALL) -e '.[look]'
	$(BIN)/python docs/look.py

# torch, in the version of requirements-dev.txt, and what the commands need. The last line marks the set-up complete:
# an interrupted one starts over, a complete one needs no network
.venv/commands: pyproject.toml requirements-dev.txt
	@echo 'setting up .venv: torch and what the commands need, a minute or two'
	$(PYTHON) -m venv .venv
	$(BIN)/$(INSTALL) --constraint requirements-dev.txt -e '.[cli]'
	touch $@

# the same environment, with what tests, linters and packaging need
.venv/ready: .venv/commands
	@echo 'setting up .venv: what the tests need, another minute or two'
	$(BIN)/$(INSTALL) -r requirements-dev.txt -e '.[cli,test]'
	touch $@

# PyPI's torch, which brings CUDA (5 GB, and no GPU is needed) and its own Triton, whose interpreter does not know
# numpy 2.4 before version 3.7
.venv-torch-%/ready: pyproject.toml
	@echo 'setting up $(@D): torch $* with CUDA and what the tests need, some minutes'
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/$(INSTALL) torch==$* 'numpy<2.4' -e '.[cli,test]'
	touch $@

# nothing is resolved, so nothing can replace torch; and in a folder of their own, where other tests do not see them:
# with torchvision there, Lightning imports it, which fails beside a CPU build of torch. yapf fills a cache when it is
# first imported, and the file is empty for a moment: here, so that no two tests do it at once
.venv/integrations/ready: .venv/ready requirements-integrations.txt
	@echo 'setting up .venv/integrations: trainers of others, some minutes'
	rm -rf $(@D)
	$(BIN)/$(INSTALL) --no-deps --target $(@D) \
		-r requirements-integrations.txt
	$(BESIDE) $(BIN)/python -c 'import yapf'
	touch $@

.venv/docs: .venv/commands
	@echo 'setting up .venv: what the pages need'
	$(BIN)/$(INSTALL) -e '.[docs]'
	touch $@

clean:
	rm -rf .venv .venv-torch-* dist
