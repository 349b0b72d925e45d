# Every target sets up what it needs in .venv first. PYTHON=python3.12 picks another interpreter.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
# processes that share the tests, each with one thread and about 2 GB
TEST_WORKERS ?= 2
# what is tested and compared has all instruction sets of this machine; `make demo` alone the fastest
export SPECENGINE_ALL_SETS := 1
# Python compiles what it imports itself, in less time than all of torch takes
PIP_INSTALL := $(RUN) -m pip install --no-compile --disable-pip-version-check -c constraints.txt
INSTALL_FILES := pyproject.toml setup.py constraints.txt $(wildcard csrc/* csrc/spec/* csrc/ops/* csrc/cpu/* csrc/cpu/*/*)

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-clients lint docs wheels sdist release clean
include tests/targets.mk bench/targets.mk

help:  ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 18

demo: $(VENV)/.installed-run  ## generate with and without speculation, and compare
	$(VENV)/bin/specengine bench --demo

# examples of property tests: `ci` repeats them in every run, `quick` a quarter of them, `explore` draws new ones
PROPERTIES ?= $(if $(CI),ci,explore)
# .ci/run calls both: RECORD=1 records coverage, AFTER_TEST=1 runs the slow tests alone, MINUTES=N what begins by then
RECORD ?=
AFTER_TEST ?=
IN_PARALLEL := -n $(TEST_WORKERS) --dist worksteal
# a test's processes read what the first of them has compiled, also where the environment would have each compile anew
test test-all: export PYTHONDONTWRITEBYTECODE :=
COVERAGE := --cov=specengine --cov-report=term --cov-fail-under=90

test: $(VENV)/.installed-dev  ## tests enough to trust a change, in minutes; none needs a GPU
	$(RUN) -m pytest $(IN_PARALLEL) -m "not slow" --hypothesis-profile=quick $(if $(RECORD),$(COVERAGE))

test-all: SANITIZED_TESTS = tests/border tests/csrc tests/models -m "not slow"
# after `make test`, as in .ci/run, only what that left out of this environment; the others take environments of their own
test-all: $(if $(AFTER_TEST),,$(if $(shell command -v g++),test-sanitized) test-clients)  ## all tests that need no GPU, with coverage; clients; borders under sanitizers
	$(RUN) -m pytest $(IN_PARALLEL) --hypothesis-profile=$(PROPERTIES) $(if $(AFTER_TEST),-m slow $(addprefix --most-minutes=,$(MINUTES)),$(COVERAGE))

# some clients want other versions than specengine: they have environments of their own, and speak to a server's process
CLIENTS := .venv-clients
OPENAI_2 := .venv-clients-openai-2
NODE := tests/clients/node
TEST_CLIENTS = -m pytest --confcutdir=tests/clients --durations=10
test-clients: export SPECENGINE_SERVER_PYTHON = $(CURDIR)/$(RUN)
test-clients: $(VENV)/.installed-dev $(CLIENTS)/.installed $(OPENAI_2)/.installed $(if $(shell command -v npm),$(NODE)/node_modules/.installed)  ## clients of the server that others wrote, against a server
	$(CLIENTS)/bin/python $(TEST_CLIENTS) tests/clients --ignore=tests/clients/openai_2
	$(OPENAI_2)/bin/python $(TEST_CLIENTS) tests/clients/openai_2

lint: $(VENV)/.installed-dev  ## ruff and mypy
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

docs: $(VENV)/.installed-docs  ## the documentation as a site in build/docs, its figures and links checked
	$(RUN) -m docs.build --check
	$(RUN) -m docs.build.site

# tried where no compiler is on the path, with the packages of .venv but for specengine's own
TRIAL := build/trial
wheels: $(VENV)/.installed-dev  ## this machine's wheel and the heads' into dist/, and the first of them tried
	rm -rf $(TRIAL) && mkdir -p $(TRIAL)/empty dist
	SPECENGINE_STRICT_BUILD=1 $(RUN) -m pip wheel --disable-pip-version-check --no-deps -w dist . ./heads ./heads/coder
	$(RUN) -m pip install --disable-pip-version-check --no-deps --target $(TRIAL)/site dist/specengine-*.whl
	PATH=$(CURDIR)/$(TRIAL)/empty PYTHONPATH=$(CURDIR)/$(TRIAL)/site $(CURDIR)/$(RUN) -P tests/installed_wheel.py

sdist: $(VENV)/.installed-dev  ## the source distributions into dist/
	$(RUN) -m pip install --disable-pip-version-check build
	$(RUN) -m build --sdist --outdir dist .
	$(RUN) -m build --sdist --outdir dist heads
	$(RUN) -m build --sdist --outdir dist heads/coder

PYTHONS ?= python3.11 python3.12 python3.13 python3.14
release: $(VENV)/.installed-dev  ## whether this checkout can be released: version, changelog, packages, each Python
	$(RUN) .ci/release.py $(PYTHONS)

clean:  ## remove what was built and cached here; .venv stays, its next use installs again
	rm -rf build dist *.egg-info .coverage htmlcov .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f specengine/_ops*.so specengine/_cpu*.so specengine/_*.pyd $(VENV)/.installed-*
	find specengine kernels tests bench research docs -type d -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# pip is the last thing that a new environment gets, so an interrupted one is made again
$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "specengine: the pinned versions need Python 3.11 or newer, this is " + sys.version.split()[0] + "; try make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(CLIENTS)/.installed: tests/clients/requirements.txt
$(OPENAI_2)/.installed: tests/clients/openai_2/requirements.txt
$(CLIENTS)/.installed $(OPENAI_2)/.installed $(LOAD)/.installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --disable-pip-version-check -r $<
	@touch $@

$(NODE)/node_modules/.installed: $(NODE)/package-lock.json
	cd $(NODE) && npm ci
	@touch $@

$(VENV)/.installed-run: $(INSTALL_FILES) | $(VENV)/bin/pip
	@$(SAY_DURATION)
	SPECENGINE_ALL_SETS=0 $(PIP_INSTALL) -e .
	@$(REPORT_EXTENSION)
	@touch $@

$(VENV)/.installed-dev: $(INSTALL_FILES) | $(VENV)/bin/pip
	@$(SAY_DURATION)
	$(PIP_INSTALL) -e '.[dev]'
	@$(REPORT_EXTENSION)
	@touch $@ $(VENV)/.installed-run

$(VENV)/.installed-docs: $(INSTALL_FILES) | $(VENV)/bin/pip
	$(PIP_INSTALL) -e '.[docs]'
	@touch $@ $(VENV)/.installed-run

# pip hides what a build prints
SAY_DURATION = echo "specengine: installing packages (torch is the largest), then compiling C++ on all processors:" \
  "some 2 minutes on two; pip shows nothing while it compiles" >&2
REPORT_EXTENSION = ls specengine/_ops*.so >/dev/null 2>&1 \
  || echo "specengine: the C++ extension was not built ($(RUN) -m pip install -v -e . says why); everything works, tree building is slower" >&2
