# Every target sets up what it needs in .venv first. PYTHON=python3.12 picks another interpreter.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
# processes that share the tests, each with one thread and about 2 GB
TEST_WORKERS ?= 2
# processes that share a GPU; most of their time they compile
GPU_WORKERS ?= 8
GPU_TESTS := -m gpu --most-seconds 300
PIP_INSTALL := $(RUN) -m pip install --disable-pip-version-check -c constraints.txt
INSTALL_FILES := pyproject.toml setup.py constraints.txt $(wildcard csrc/* csrc/spec/* csrc/ops/* csrc/cpu/* csrc/cpu/*/*)

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-sanitized test-clients test-aarch64 test-mutants lint bench peers bench-peers bench-real papers bench-micro bench-server docs test-gpu test-gpu-offline test-device-pins bench-gpu bench-gpu-offline wheels sdist clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 18

demo: $(VENV)/.installed-run  ## generate with and without speculation, and compare
	$(VENV)/bin/specengine bench --demo

# examples of property tests: `ci` repeats them in every run, `explore` draws new ones
PROPERTIES ?= $(if $(CI),ci,explore)
# .ci/run calls both targets: RECORD=1 makes `test` record coverage, AFTER_TEST=1 makes `test-all` add to it, without
# repeating the tests of `test`
RECORD ?=
AFTER_TEST ?=
IN_PARALLEL := -n $(TEST_WORKERS) --dist worksteal
COVERAGE := --cov=specengine --cov-report=

test: $(VENV)/.installed-dev  ## tests enough to trust a change, in minutes; none needs a GPU
	$(RUN) -m pytest $(IN_PARALLEL) -m "not slow" --hypothesis-profile=ci $(if $(RECORD),$(COVERAGE))

test-all: SANITIZED_TESTS = tests/border tests/csrc tests/models -m "not slow"
# after `make test`, as in .ci/run, only what that left out of this environment; the others take environments of their own
test-all: $(if $(AFTER_TEST),,$(if $(shell command -v g++),test-sanitized) test-clients)  ## all tests that need no GPU, with coverage; clients; borders under sanitizers
	$(RUN) -m pytest $(IN_PARALLEL) $(if $(AFTER_TEST),-m slow --cov-append) --hypothesis-profile=$(PROPERTIES) \
	  $(COVERAGE)term --cov-fail-under=90

# in a copy of the sources, whose extensions take the place of the installed ones; SANITIZED_TESTS=tests/border is a part
SANITIZED := build/sanitized
SANITIZED_TESTS ?= tests
WATCHERS = $(foreach name,asan ubsan stdc++,$(shell g++ -print-file-name=lib$(name).so))
test-sanitized: $(VENV)/.installed-dev  ## all tests, extensions built to watch memory and undefined behaviour
	rm -rf $(SANITIZED) && mkdir -p $(SANITIZED)
	git ls-files -z | tar --null --files-from=- -cf - | tar -xf - -C $(SANITIZED)
	cd $(SANITIZED) && SPECENGINE_SANITIZE=1 $(CURDIR)/$(RUN) setup.py -q build_ext --inplace
	cd $(SANITIZED) && ls specengine/_ops*.so specengine/_cpu*.so
	cd $(SANITIZED) && LD_PRELOAD="$(WATCHERS)" ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 \
	  UBSAN_OPTIONS=print_stacktrace=1 PYTHONMALLOC=malloc PYTHONPATH=$(CURDIR)/$(SANITIZED) \
	  $(CURDIR)/$(RUN) -m pytest $(IN_PARALLEL) $(SANITIZED_TESTS)

# some clients want other versions than specengine: they have environments of their own, and speak to a server's process
CLIENTS := .venv-clients
OPENAI_2 := .venv-clients-openai-2
NODE := tests/clients/node
LOAD := .venv-load
TEST_CLIENTS = -m pytest --confcutdir=tests/clients --durations=10
test-clients: export SPECENGINE_SERVER_PYTHON = $(CURDIR)/$(RUN)
test-clients: $(VENV)/.installed-dev $(CLIENTS)/.installed $(OPENAI_2)/.installed $(if $(shell command -v npm),$(NODE)/node_modules/.installed)  ## clients of the server that others wrote, against a server
	$(CLIENTS)/bin/python $(TEST_CLIENTS) tests/clients --ignore=tests/clients/openai_2
	$(OPENAI_2)/bin/python $(TEST_CLIENTS) tests/clients/openai_2

# other engines, each in an environment of its own: `specengine bench --way peer:NAME`; what cannot be had is left out
PEERS ?= $(basename $(notdir $(wildcard bench/peers/*.txt)))
peers: $(PEERS:%=peer-%)  ## environments of other engines in .peers, for specengine bench; PEERS="openvino vllm" some
peer-%: bench/peers/%.txt
	@mkdir -p .peers && cp bench/peers/answer.py .peers/
	$(PYTHON) -m venv .peers/$*
	.peers/$*/bin/python -m pip install --disable-pip-version-check -r $< || { rm -rf .peers/$*; \
	  echo "peers: $* cannot be installed here, bench lists it as not run" >&2; }
	@[ ! -d .peers/$* ] || sed -n 's/^# uninstall: //p' $< | xargs --no-run-if-empty .peers/$*/bin/python -m pip uninstall -y

# greedy, each answer compared with plain decoding's; PROMPTS=prompts asks the development prompts
PROMPTS ?=
OTHERS := generate generate-compiled prompt-lookup $(addprefix peer:,llama.cpp llama.cpp/prompt-lookup ik_llama.cpp openvino \
  openvino/prompt-lookup vllm vllm/ngram vllm/eagle3 onnxruntime)
bench-peers: $(VENV)/.installed-run  ## specengine beside the engines of `make peers`, resumable
	$(RUN) -m specengine bench --way auto $(OTHERS:%=--way %) $(if $(PROMPTS),--prompts $(PROMPTS)) --per-set 2 --out build/results/peers.jsonl

# model files that people run, from their parts; ONLY="NAME NAME" some, PROMPTS=FOLDER beside the code edits
bench-real: $(VENV)/.installed-run  ## drafts and the engines of `make peers` on files of 0.5B and 1.5B, resumable
	$(RUN) -m bench.real $(ONLY:%=--only %) $(if $(PROMPTS),--prompts $(PROMPTS))

# the same programs as tests/csrc runs; order_test.cpp holds the bits that an x86-64 has
ARM_CXX ?= aarch64-linux-gnu-g++
ARM_RUN ?= qemu-aarch64
ARM := build/aarch64
test-aarch64:  ## the C++ tests for aarch64 under an emulator (Debian: g++-aarch64-linux-gnu, qemu-user)
	@for tool in $(ARM_CXX) $(ARM_RUN); do command -v $$tool >/dev/null || { echo "test-aarch64: needs $$tool on the path \
	  (Debian: apt install g++-aarch64-linux-gnu qemu-user)" >&2; exit 1; }; done
	mkdir -p $(ARM)
	$(PYTHON) -c 'import runpy; runpy.run_path("setup.py")["list_formats"]("$(ARM)")'
	ls csrc/cpu/isa_*.cpp csrc/tests/cpu/*.cpp csrc/tests/cpu_test.cpp | xargs -P $(TEST_WORKERS) -I{} sh -c \
	  '$(ARM_CXX) -std=c++17 -O1 -ffp-contract=off -fno-math-errno -Wno-psabi -Icsrc -I$(ARM) -c {} -o $(ARM)/$$(basename {} .cpp).o'
	$(ARM_CXX) -static -pthread $(ARM)/*.o -o $(ARM)/cpu_test
	$(ARM_CXX) -static -std=c++17 -O1 -Icsrc csrc/tests/spec_test.cpp csrc/tests/spec/*.cpp -o $(ARM)/spec_test
	$(ARM_RUN) $(ARM)/spec_test
	$(ARM_RUN) $(ARM)/cpu_test without-forks

# hours, resumable; ONLY="NAME NAME" tries some
ONLY ?=
test-mutants: $(VENV)/.installed-dev  ## small mistakes in a copy of the sources, one at a time: do the tests notice?
	$(RUN) -m tests.mutants --out build/results/mutants.jsonl $(if $(ONLY),--only $(ONLY))

lint: $(VENV)/.installed-dev  ## ruff and mypy
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

END_TO_END := --policy generate --policy prompt-lookup --policy auto --rounds 3
bench: $(VENV)/.installed-run  ## overhead, speed and exactness on this machine's CPU
	$(RUN) -m bench.overhead --out build/results/overhead.jsonl
	$(RUN) -m bench.policies $(END_TO_END) --out build/results/end-to-end.jsonl
	$(RUN) -m bench.exactness --out build/results/exactness.jsonl
	$(RUN) -m bench.tree_construction --out build/results/tree-construction.jsonl
	$(RUN) -m bench.policies --per-set 3 --max-new-tokens 64 --out build/results/policies.jsonl
	$(RUN) -m bench.report build/results/policies.jsonl build/results/tree-construction.jsonl

# goes on where it was stopped; QUICK=1 takes 6 prompts and short answers
PAPERS := build/papers$(if $(QUICK),-quick)
papers: $(VENV)/.installed-run  ## each paper's claim, with a verdict, and rows that ablate it; QUICK=1 in minutes
	$(RUN) -m bench.papers $(PAPERS) $(if $(QUICK),--quick)

# MICRO picks cases, as pytest -k does
MICRO ?= alpha1.35 and parents10
bench-micro: $(VENV)/.installed-dev  ## the time to choose a layer of the tree, under pytest-benchmark
	$(RUN) -m pytest bench/tree_construction.py --benchmark-only -q -k "$(MICRO)"

bench-server: $(VENV)/.installed-dev $(LOAD)/.installed  ## the server under load, and under badly behaved clients
	$(RUN) -m bench.load --guidellm $(LOAD)/bin/guidellm --out build/results/server-load.jsonl
	$(RUN) -m tests.serve.storm --out build/results/server-storm.jsonl
	$(RUN) -m tests.request.random_schemas --out build/results/random-schemas.jsonl
	$(RUN) -m tests.serve.hostile --out build/results/server-hostile.jsonl
	$(RUN) -m tests.serve.hostile --connections 1000 --out build/results/server-hostile-2000.jsonl

docs: $(VENV)/.installed-docs  ## the documentation as a site in build/docs, its figures and links checked
	$(RUN) -m docs.build --check
	$(RUN) -m docs.build.site

test-gpu: $(VENV)/.installed-gpu  ## the tests that need a CUDA device
	$(RUN) -m pytest $(GPU_TESTS) -n $(GPU_WORKERS) --dist worksteal

# for a machine without a network, whose Python has torch, triton, transformers and pytest: nothing is installed. Each
# part ends within nine minutes, and leaves what it has found so far
OFFLINE := build/offline
ON_PATH := PYTHONPATH=$(CURDIR):$(CURDIR)/$(OFFLINE)$(if $(PYTHONPATH),:$(PYTHONPATH))
define LINK_SOURCES
mkdir -p $(OFFLINE)
ln -sfn $(CURDIR)/kernels $(OFFLINE)/specengine_kernels
ln -sfn $(CURDIR)/csrc $(OFFLINE)/specengine_csrc
endef
NINE_MINUTES := timeout --signal=INT --kill-after=20 540
PARTS ?= kernels graphs
test-gpu-offline: $(OFFLINE)/.built  ## the same for kernels, then graphs, with the packages that PYTHON has
	$(MAKE) -k $(addprefix test-gpu-offline-,$(PARTS))

# without the forward on CPUs, which takes longest to compile
$(OFFLINE)/.built: $(INSTALL_FILES)
	$(LINK_SOURCES)
	-SPECENGINE_CPU=0 $(PYTHON) setup.py -q build_ext --inplace
	@touch $@

PYTEST_OFFLINE = $(ON_PATH) $(NINE_MINUTES) $(PYTHON) -m pytest $(GPU_TESTS) --continue-on-collection-errors \
  --junitxml=$(RESULTS)/$@.xml $$($(PYTHON) -c 'import xdist' 2>/dev/null && printf '%s' '-n $(GPU_WORKERS) --dist worksteal')
test-gpu-offline-kernels: $(OFFLINE)/.built
	$(PYTEST_OFFLINE) tests/kernels tests/cuda
test-gpu-offline-graphs: $(OFFLINE)/.built
	$(PYTEST_OFFLINE) tests/graphs

# RESULTS=$$OUT is another folder. MODEL: a model's folder, by default what `python -m bench.offline split build/parts`
# has been carried there in; the large model is made of it. In this order: kernels show first whether anything runs
RESULTS ?= bench/results
MODEL ?= build/smollm2-135m-instruct
BENCHES ?= kernels small 8b
MEASURE = $(ON_PATH) $(NINE_MINUTES) $(PYTHON) -m
bench-gpu-offline: $(OFFLINE)/.built  ## kernels, graphs and an 8B model on a CUDA device without a network
	$(MAKE) -k $(addprefix bench-gpu-offline-,$(BENCHES))
bench-gpu-offline-kernels: $(OFFLINE)/.built
	$(MEASURE) bench.kernels --quick --out $(RESULTS)/kernels-quick-gpu.jsonl
bench-gpu-offline-small: $(OFFLINE)/.built $(MODEL)/config.json
	$(ON_KERNELS) $(MEASURE) bench.graphs --model $(MODEL) $(FEW) --out $(RESULTS)/graphs-few-gpu.jsonl
bench-gpu-offline-8b: $(OFFLINE)/.built $(MODEL)/config.json
	test -f build/8b/config.json || $(MEASURE) research.inflate --model $(MODEL) --shape 8b --out build/8b
	$(ON_KERNELS) $(MEASURE) bench.graphs --model build/8b --draft build/8b/head $(FEW) --out $(RESULTS)/graphs-8b-gpu.jsonl
build/smollm2-135m-instruct/config.json: $(OFFLINE)/.built
	$(ON_PATH) $(PYTHON) -m bench.offline join build/parts $(@D)

# torch's CUDA build runs without a device, from some 6 GB of packages
PINS := .venv-pins
PINS_PYTHON ?= python3.12
PINS_TESTS ?= tests/graphs tests/cuda tests/ops tests/kernels
test-device-pins: $(PINS)/.installed  ## with the packages of a device's image, tests that stand for a device
	$(LINK_SOURCES)
	$(PINS)/bin/python setup.py -q build_ext --inplace
	$(ON_PATH) $(PINS)/bin/python -m pytest $(IN_PARALLEL) -m "not slow and not model" $(PINS_TESTS)
$(PINS)/.installed: tests/cuda/pins.txt
	$(PINS_PYTHON) -m venv $(PINS)
	$(PINS)/bin/python -m pip install --disable-pip-version-check -r $<
	@touch $@

# each writes a record as soon as it has it, and what fails does not end the rest; kernels first
bench-gpu: $(VENV)/.installed-gpu  ## the same on a CUDA device, kernels and graphs first, into bench/results
	-$(PIP_INSTALL) -e '.[peers]'
	-$(RUN) -m bench.kernels --out bench/results/kernels-gpu.jsonl
	-$(RUN) -m bench.layers --out bench/results/layers-gpu.jsonl
	-$(ON_KERNELS) $(RUN) -m bench.graphs --strict --out bench/results/graphs-gpu.jsonl
	-$(RUN) -m research.inflate --shape 8b --out build/8b
	-$(ON_KERNELS) $(RUN) -m bench.graphs --model build/8b --draft build/8b/head $(FEW) --out bench/results/graphs-8b-gpu.jsonl
	-$(RUN) -m bench.policies --device cuda --rounds 3 --out bench/results/policies-gpu.jsonl
	-$(RUN) -m bench.tree_construction --device cuda --out bench/results/tree-construction-gpu.jsonl
	-$(RUN) -m bench.overhead --device cuda --out bench/results/overhead-gpu.jsonl
	-$(RUN) -m bench.policies $(END_TO_END) --device cuda --out bench/results/end-to-end-gpu.jsonl
	-$(RUN) -m bench.exactness --device cuda --out bench/results/exactness-gpu.jsonl
	$(RUN) -m bench.report --plot $(addprefix bench/results/,$(addsuffix -gpu.jsonl,kernels graphs graphs-8b policies tree-construction))

# of a model for which each way takes minutes
FEW := --ours --policy auto --policy eagle --per-set 2 --rounds 2

# without trials; trees that stand on the host are built by C++
ON_KERNELS := SPECENGINE_BACKEND=triton,cuda,cpp

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
$(LOAD)/.installed: bench/load-requirements.txt
$(CLIENTS)/.installed $(OPENAI_2)/.installed $(LOAD)/.installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --disable-pip-version-check -r $<
	@touch $@

$(NODE)/node_modules/.installed: $(NODE)/package-lock.json
	cd $(NODE) && npm ci
	@touch $@

$(VENV)/.installed-run: $(INSTALL_FILES) | $(VENV)/bin/pip
	@$(SAY_DURATION)
	$(PIP_INSTALL) -e .
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

$(VENV)/.installed-gpu: $(INSTALL_FILES) | $(VENV)/bin/pip
	$(PIP_INSTALL) -e '.[dev,kernels]'
	@$(REPORT_EXTENSION)
	@touch $@ $(VENV)/.installed-dev $(VENV)/.installed-run

# pip hides what a build prints
SAY_DURATION = echo "specengine: installing packages (torch is the largest), then compiling C++ on all processors:" \
  "some 3 to 4 minutes on two; pip shows nothing while it compiles" >&2
REPORT_EXTENSION = ls specengine/_ops*.so >/dev/null 2>&1 \
  || echo "specengine: the C++ extension was not built ($(RUN) -m pip install -v -e . says why); everything works, tree building is slower" >&2
