# Everything runs in .venv, which the first target makes with nothing but Python >= 3.11 and a package index.

SHELL := bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SERVES := $(VENV)/.serves

.PHONY: help demo wheel test-fast test test-thorough test-clients test-families test-chat-model models explore fuzz test-security audit sbom test-newest test-convert test-containers lint types protos check-protos client check-client dashboards check-dashboards page-image top-image chat-image readme-demo lock bench clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

demo: $(SERVES) ## Start the three processes, stream a completion, print its numbers, stop
	@$(BIN)/specd demo

# Each floor by itself: the unit tests then show that they do without MLX.
PYTEST := $(BIN)/python -m pytest

# Two files at a time, in processes of their own. More would take the cores from the workers that the tests start.
# If a process dies, the run ends with the name of its test. A new process would begin the same file again.
PARALLEL := -n 2 --dist loadfile --max-worker-restart 0

wheel: $(SERVES) ## Build the wheel into dist
	@$(BIN)/python -m hatchling build --target wheel --directory dist

test-fast: $(READY) ## Run the unit and the worker tests in under 3 minutes, of the slow cases every tenth
	@$(PYTEST) tests/unit $(PARALLEL) --fast $(PYTEST_ARGS)
	@$(PYTEST) tests/worker $(PARALLEL) --fast $(PYTEST_ARGS)

test: $(READY) ## Run the tests, but not the thorough ones and those of clients, security, families, containers
	@$(PYTEST) tests/unit $(PARALLEL) $(PYTEST_ARGS)
	@$(PYTEST) tests/worker $(PARALLEL) $(PYTEST_ARGS)
	@$(PYTEST) tests/e2e tests/gateway tests/deploy $(PARALLEL) $(PYTEST_ARGS)

test-clients: $(READY) ## Call a running stack with the clients that people have; installs them
	@$(PYTEST) tests/clients $(PYTEST_ARGS)

test-thorough: $(READY) ## Run the tests that make test leaves out; SHARD=1/3 or THOROUGH_SECONDS=600 runs a part
	@$(PYTEST) tests/unit tests/worker tests/e2e tests/gateway tests/deploy -m thorough --thorough $(PARALLEL) \
	  --deselect 'tests/e2e/test_chat_model.py::test_a_conversation_is_that_of_mlx_lm[all' \
	  $(if $(SHARD),--shard $(SHARD)) $(if $(THOROUGH_SECONDS),--seconds $(THOROUGH_SECONDS)) $(PYTEST_ARGS)

test-chat-model: $(READY) ## Hold 40 conversations with a published chat model, greedy and sampled, as mlx-lm does
	@$(PYTEST) tests/e2e/test_chat_model.py --thorough $(PARALLEL) $(PYTEST_ARGS)

EXPLORE_SECONDS ?= 300
ifndef SEED
SEED := $(shell od -An -N4 -tu4 /dev/urandom | tr -d ' ')
endif
EXPLORE := $(PYTEST) tests/unit tests/worker -m hypothesis --hypothesis-profile=explore --hypothesis-seed=$(SEED)

explore: $(READY) ## Try new examples in the property tests, for EXPLORE_SECONDS; SEED=... repeats a run
	@echo "explore: SEED=$(SEED)"
	@$(EXPLORE) --seconds=$(EXPLORE_SECONDS) $(PYTEST_ARGS) || { \
	  echo "explore: FAILED with SEED=$(SEED); what failed runs once more, and counts only if it fails again"; \
	  $(EXPLORE) --last-failed --last-failed-no-failures=none $(PYTEST_ARGS); }

NEWEST := .venv-newest

test-newest: $(READY) ## Run the core of the suite on the newest mlx and mlx-lm of the index
	@mkdir -p $(NEWEST)
	@printf 'mlx[cpu]; sys_platform == "linux"\nmlx\nmlx-lm\n' | \
	  $(BIN)/uv pip compile --quiet --no-annotate --no-header --no-emit-index-url - | grep -E '^mlx' > $(NEWEST)/newest.txt
	@if grep -qvFf <(sed -n 's/^\(mlx[a-z-]*==[^ ;]*\).*/\1/p' requirements.lock) $(NEWEST)/newest.txt; then \
	  $(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python $(NEWEST)/venv && \
	  $(BIN)/uv pip install --quiet --python $(NEWEST)/venv --require-hashes -r requirements.lock && \
	  $(BIN)/uv pip install --quiet --python $(NEWEST)/venv -r $(NEWEST)/newest.txt && \
	  $(BIN)/uv pip install --quiet --python $(NEWEST)/venv --no-deps --editable . && \
	  echo "test-newest: $$(tr '\n' ' ' < $(NEWEST)/newest.txt)" && \
	  $(NEWEST)/venv/bin/python -m pytest tests/worker tests/e2e/test_exactness.py --fast $(PYTEST_ARGS); \
	else echo "test-newest: the newest mlx and mlx-lm of the index are those of requirements.lock"; fi

# `make test` runs the families in one process; this target runs them in real processes.
test-families: $(READY) ## Decode with every family of mlx-lm, in real processes; SHARD=1/3 runs a third
	@$(PYTEST) tests/families -n 2 $(if $(SHARD),--shard $(SHARD)) $(PYTEST_ARGS)

models: $(READY) ## Write docs/models.md
	@$(BIN)/python -m tests.worker.families > docs/models.md

fuzz: $(READY) ## Send 100,000 random and mutated messages to every RPC and to the gateway
	@$(BIN)/python -m tests.e2e.fuzzing $(FUZZ_ARGS)

# Where the pace of the machine decides, an attack has it to itself.
test-security: $(READY) ## Attack the three processes, each check for itself, in under 10 minutes
	@$(PYTEST) tests/security -m 'not alone' $(PARALLEL) $(PYTEST_ARGS)
	@$(PYTEST) tests/security -m alone $(PYTEST_ARGS)

audit: $(READY) ## List known vulnerabilities of the locked packages; needs the index's advisories
	@$(BIN)/uv tool run pip-audit==2.10.1 --disable-pip --require-hashes -r requirements.lock

sbom: $(READY) ## Write what the images install to dist, as CycloneDX
	@mkdir -p dist
	@for lock in $(LOCKS)/coordinator.lock $(LOCKS)/worker.lock $(LOCKS)/worker-cuda.lock; do \
	  $(BIN)/uv tool run --from cyclonedx-bom==7.5.0 cyclonedx-py requirements --pyproject pyproject.toml \
	    --output-reproducible -o dist/$$(basename $$lock .lock).cdx.json $$lock; done

# PyTorch is large, and no other test wants it.
test-convert: $(READY) ## Install PyTorch, read pickle weights and compare conversions with transformers
	@$(BIN)/uv pip install --quiet --python $(VENV) 'torch>=2.6'
	@$(PYTEST) tests/worker/test_convert.py $(PYTEST_ARGS)

test-containers: $(READY) ## Build the images and test them; needs a Docker engine
	@$(PYTEST) tests/containers $(PYTEST_ARGS)

bench: $(READY) ## Measure specd against the target alone and against mlx-lm
	@$(BIN)/specd bench

lint: $(READY) ## Format check, lint, wording, protobuf lint, Dockerfile lint
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/python -m tests.wording
	@$(BIN)/buf lint
	@$(BIN)/hadolint deploy/Dockerfile

types: $(READY) ## Type check
	@$(BIN)/mypy

protos: $(READY) ## Regenerate the stubs in specd/v1
	@$(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=. --pyi_out=. --grpc_python_out=. protos/specd/v1/*.proto

check-protos: protos ## Fail if the committed stubs are not what the protos give
	@git diff --exit-code --stat -- specd/v1 && test -z "$$(git status --porcelain -- specd/v1)"

client: $(READY) ## Write the client for threads from the one for event loops
	@$(BIN)/python -m tools.sync_client

check-client: client ## Fail if the committed client for threads is not what the other one gives
	@git diff --exit-code --stat -- specd/client

dashboards: $(READY) ## Regenerate the dashboards in deploy/grafana
	@$(BIN)/python -m deploy.grafana.generate

check-dashboards: dashboards ## Fail if the committed dashboards are not what their program gives
	@git diff --exit-code --stat -- deploy/grafana/dashboards && test -z "$$(git status --porcelain -- deploy/grafana/dashboards)"

page-image: $(READY) ## Draw the gateway's page over answers into docs/images; needs chromium
	@$(BIN)/python -m tests.gateway.page_image

top-image: $(READY) ## Draw a frame of specd top over a load into docs/images
	@$(BIN)/python -m tests.e2e.top_image

chat-image: $(READY) ## Draw a conversation of specd chat into docs/images
	@$(BIN)/python -m tests.e2e.chat_image

readme-demo: $(READY) ## Write what specd demo prints into the README
	@$(BIN)/python -m tests.e2e.readme_demo

COMPILE := $(BIN)/uv pip compile --quiet --universal --generate-hashes --no-emit-index-url --no-annotate --no-header
LOCKS := deploy/locks
# Packages that only workers need. hf-xet is for downloads, which a coordinator does not do. mlx-lm stays in the
# coordinator's image for the gateway, which needs its parsers of tool calls; they run without MLX.
WORKERS_ONLY := greenlet psutil mlx sentencepiece scipy-openblas32 lief hf-xet

lock: $(READY) ## Compile requirements.lock from pyproject.toml, and of the same versions the locks of the images
	@$(COMPILE) --extra dev pyproject.toml -o requirements.lock
	@printf '%s\n' hatchling editables | $(COMPILE) -c requirements.lock - -o $(LOCKS)/build.lock
	@printf '%s\n' $(WORKERS_ONLY) | $(COMPILE) -c requirements.lock --extra tracing --extra valkey --excludes - pyproject.toml -o $(LOCKS)/coordinator.lock
	@$(COMPILE) -c requirements.lock --extra serve pyproject.toml -o $(LOCKS)/worker.lock
	@# Both mlx-cpu and mlx-cuda-13 bring libmlx.so.
	@echo 'mlx[cuda13]' | $(COMPILE) -c requirements.lock --no-emit-package mlx-cpu --extra serve pyproject.toml - -o $(LOCKS)/worker-cuda.lock

clean: ## Remove what the other targets made
	rm -rf $(VENV) $(NEWEST) tests/clients/node/node_modules dist .hypothesis .mypy_cache .pytest_cache .ruff_cache

CHECK_PYTHON = $(PYTHON) -c 'import sys; sys.exit(f"specd needs Python 3.11 or later, and this is {sys.version.split()[0]}: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check

# As much as serving needs, a third of it all.
$(SERVES): $(LOCKS)/worker.lock $(LOCKS)/build.lock pyproject.toml
	@$(CHECK_PYTHON)
	@$(PYTHON) -m venv $(VENV)
	@echo "installing specd and what it needs to serve into $(VENV): 0.5 GB, which takes a minute"
	@$(INSTALL) --require-hashes -r $(LOCKS)/worker.lock -r $(LOCKS)/build.lock
	@$(INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@

$(READY): requirements.lock pyproject.toml
	@$(CHECK_PYTHON)
	@$(PYTHON) -m venv $(VENV)
	@echo "installing specd and its dependencies into $(VENV): 1.2 GB, which takes minutes"
	@$(INSTALL) --require-hashes -r requirements.lock
	@$(INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@ $(SERVES)
