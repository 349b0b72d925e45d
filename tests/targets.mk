# Targets for a thorough look, seldom needed.
.PHONY: test-sanitized test-aarch64 test-mutants

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
