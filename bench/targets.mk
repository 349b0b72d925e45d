# Targets for a machine that measures, and for one with a GPU.
.PHONY: bench peers bench-peers bench-real papers bench-micro bench-server \
  test-gpu test-gpu-offline test-device-pins bench-gpu bench-gpu-offline bench-gpu-plan
# processes that share a GPU; most of their time they compile
GPU_WORKERS ?= 8
GPU_TESTS := -m gpu --most-seconds 300
LOAD := .venv-load

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

# PYTHON has torch, as above; bench-gpu-plan-PART is one part (cycles, tests, answers, kernels)
bench-gpu-plan: RESULTS = build/results
bench-gpu-plan-%: RESULTS = build/results
bench-gpu-plan:  ## what the next CUDA device is asked, in parts of nine minutes that go on where they were cut off
	$(RUN_PLAN)
bench-gpu-plan-%:
	$(RUN_PLAN) --part $*
define RUN_PLAN
@$(ON_PATH) $(PYTHON) -m bench.gpu_plan --check
@$(MAKE) --no-print-directory $(OFFLINE)/.built
@$(ON_PATH) $(PYTHON) -m bench.gpu_plan --results $(RESULTS)
endef

# torch's CUDA build runs without a device, from some 6 GB of packages
PINS := .venv-pins
PINS_PYTHON ?= python3.12
PINS_TESTS ?= tests/graphs tests/cuda tests/ops
PINS_RUN = $(ON_PATH) $(PINS)/bin/python -m pytest $(IN_PARALLEL) -m "not slow and not model"
test-device-pins: $(PINS)/.installed  ## with the packages of a device's image, tests that stand for a device
	$(LINK_SOURCES)
	$(PINS)/bin/python setup.py -q build_ext --inplace
	$(PINS_RUN) $(PINS_TESTS)
# apart: behind the others two of them fail in Triton 3.6's interpreter, for a reason that is not known
	$(PINS_RUN) tests/kernels
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

$(VENV)/.installed-gpu: $(INSTALL_FILES) | $(VENV)/bin/pip
	$(PIP_INSTALL) -e '.[dev,kernels]'
	@$(REPORT_EXTENSION)
	@touch $@ $(VENV)/.installed-dev $(VENV)/.installed-run

$(LOAD)/.installed: bench/load-requirements.txt
