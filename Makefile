# Everything runs in .venv, which the first target makes with nothing but Python >= 3.11 and a package index.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help demo test explore test-containers lint types protos check-protos dashboards check-dashboards dashboard-images lock bench clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

demo: $(READY) ## Start the three processes, stream a completion, print its numbers, stop
	@$(BIN)/specd demo

test: $(READY) ## Run the test suite
	@$(BIN)/python -m pytest -m "not containers" $(PYTEST_ARGS)

explore: $(READY) ## Try the property tests on other examples than the suite's, and on more of them
	@$(BIN)/python -m pytest -m "hypothesis and not processes" --hypothesis-profile=explore $(PYTEST_ARGS)

test-containers: $(READY) ## Build the images and test them; needs a Docker engine
	@$(BIN)/python -m pytest -m containers tests/test_deployment.py $(PYTEST_ARGS)

bench: $(READY) ## Measure specd against the target alone and against mlx-lm
	@$(BIN)/specd bench

lint: $(READY) ## Format check, lint, protobuf lint, Dockerfile lint
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/buf lint
	@$(BIN)/hadolint deploy/Dockerfile

types: $(READY) ## Type check
	@$(BIN)/mypy

protos: $(READY) ## Regenerate the stubs in specd/v1
	@$(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=. --pyi_out=. --grpc_python_out=. protos/specd/v1/*.proto

check-protos: protos ## Fail if the committed stubs are not what the protos give
	@git diff --exit-code --stat -- specd/v1 && test -z "$$(git status --porcelain -- specd/v1)"

dashboards: $(READY) ## Regenerate the dashboards in deploy/grafana
	@$(BIN)/python -m deploy.grafana.generate

check-dashboards: dashboards ## Fail if the committed dashboards are not what their program gives
	@git diff --exit-code --stat -- deploy/grafana/dashboards && test -z "$$(git status --porcelain -- deploy/grafana/dashboards)"

dashboard-images: $(READY) ## Record a run of four minutes and draw the dashboards into docs/images; needs prometheus
	@$(BIN)/python -m deploy.grafana.render

COMPILE := $(BIN)/uv pip compile --quiet --universal --generate-hashes --no-emit-index-url --no-annotate --no-header
LOCKS := deploy/locks
# What only workers need. A coordinator downloads nothing either, which is what hf-xet is for.
WORKERS_ONLY := mlx mlx-lm scipy-openblas32 lief hf-xet

lock: $(READY) ## Compile requirements.lock from pyproject.toml, and of the same versions the locks of the images
	@$(COMPILE) --extra dev pyproject.toml -o requirements.lock
	@echo hatchling | $(COMPILE) -c requirements.lock - -o $(LOCKS)/build.lock
	@printf '%s\n' $(WORKERS_ONLY) | $(COMPILE) -c requirements.lock --extra tracing --excludes - pyproject.toml -o $(LOCKS)/coordinator.lock
	@$(COMPILE) -c requirements.lock pyproject.toml -o $(LOCKS)/worker.lock
	@# Both mlx-cpu and mlx-cuda-13 bring libmlx.so.
	@echo 'mlx[cuda13]' | $(COMPILE) -c requirements.lock --no-emit-package mlx-cpu pyproject.toml - -o $(LOCKS)/worker-cuda.lock

clean: ## Remove what the other targets made
	rm -rf $(VENV) dist .hypothesis .mypy_cache .pytest_cache .ruff_cache

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(f"specd needs Python 3.11 or later, and this is {sys.version.split()[0]}: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	@$(PYTHON) -m venv $(VENV)
	@echo "installing specd and what it needs into $(VENV)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@
