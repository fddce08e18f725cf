"""The allowed imports between packages: the rule of docs/design.md, for every module of every package."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

ROOT = next(parent for parent in Path(__file__).parents if (parent / "pyproject.toml").is_file())
PACKAGES = ("specd", "draft_worker", "target_worker", "coordinator", "gateway")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if "v1" not in path.parts)

# What each layer may import of ours; the first that is a prefix of a module's name is its layer.
FLOOR = ("specd",)
WORKER = (*FLOOR, "specd.v1", "specd.identity", "specd.rpc", "specd.worker")
LAYERS: dict[str, tuple[str, ...]] = {
    "specd.v1": ("specd.v1",),
    "specd.identity": (*FLOOR, "specd.identity"),
    "specd.rpc": (*FLOOR, "specd.v1", "specd.identity", "specd.rpc"),
    "specd.text": (*FLOOR, "specd.text"),
    "specd.matching": (*FLOOR, "specd.text", "specd.matching"),
    "specd.client": (*FLOOR, "specd.v1", "specd.rpc", "specd.text", "specd.client"),
    "specd.worker.sampling": (*FLOOR, "specd.worker.sampling"),
    "specd.worker.cpu": (*FLOOR, "specd.worker.cpu"),
    "specd.worker.layers": (*FLOOR, "specd.worker.layers"),
    "specd.worker.engine": (*FLOOR, "specd.worker.engine", "specd.worker.cpu", "specd.worker.layers"),
    "specd.worker.model": (
        *FLOOR,
        "specd.worker.model",
        "specd.worker.engine",
        "specd.worker.cpu",
        "specd.worker.layers",
        "specd.worker.heads",
    ),
    "specd.worker.heads": (*FLOOR, "specd.worker.heads", "specd.worker.engine", "specd.worker.layers"),
    "specd.worker.session": (
        *FLOOR,
        "specd.v1",
        "specd.rpc",
        "specd.text",
        "specd.matching",
        "specd.worker.session",
        "specd.worker.engine",
        "specd.worker.layers",
        "specd.worker.sampling",
        "specd.worker.model",
        "specd.worker.heads",
    ),
    "specd.worker.ranks": (
        *FLOOR,
        "specd.v1",
        "specd.identity",
        "specd.rpc.credentials",
        "specd.worker.ranks",
        "specd.worker.engine",
        "specd.worker.cpu",
        "specd.worker.layers",
        "specd.worker.model",
    ),
    "specd.worker": WORKER,
    "specd.cli.models": (
        *FLOOR,
        "specd.cli.models",
        *(
            f"specd.worker.model.{name}"
            for name in ("directory", "files", "fingerprint", "outline", "safetensors_file")
        ),
        "specd.worker.heads.marks",
        "gateway.reply.format",  # the one place that knows which calls of tools are read
    ),
    "specd.cli.pairs": (
        *FLOOR,
        "specd.cli.models",
        "specd.cli.pairs",
        *(f"specd.worker.model.{name}" for name in ("files", "fingerprint", "outline")),
    ),
    "specd.cli": (
        *FLOOR,
        "specd.v1",
        "specd.identity",
        "specd.rpc",
        "specd.client",
        "specd.cli",
        "specd.bench",
        "specd.worker.cpu",
        "specd.worker.model.directory",
        "specd.worker.model.outline",  # what can be told of a model without MLX
        "specd.worker.model.adapter_files",  # the same of its adapters
        "specd.worker.model.conversion",  # only when it runs: it needs MLX
    ),
    "specd.bench": (*FLOOR, "specd.v1", "specd.rpc", "specd.text", "specd.client", "specd.bench", "specd.worker"),
    "specd.__main__": ("specd.cli",),
    "specd": FLOOR,
    "draft_worker": (*WORKER, "draft_worker"),
    "target_worker": (*WORKER, "target_worker"),
    "coordinator.core": FLOOR,
    "coordinator.sessions": (*FLOOR, "specd.text", "coordinator.core", "coordinator.sessions"),
    "coordinator.sources": FLOOR,
    "coordinator.planner": (*FLOOR, "coordinator.core", "coordinator.sources", "coordinator.planner"),
    "coordinator.telemetry": (*FLOOR, "coordinator.core", "coordinator.telemetry", "specd.rpc"),
    "coordinator.workers": (
        *FLOOR,
        "specd.v1",
        "specd.identity",
        "specd.rpc",
        "specd.text",
        "coordinator.core",
        "coordinator.workers",
    ),
    "coordinator.proposals": (
        *FLOOR,
        "specd.matching",
        "coordinator.core",
        "coordinator.workers",
        "coordinator.proposals",
    ),
    "coordinator.canary": (
        *FLOOR,
        "coordinator.core",
        "coordinator.planner",
        "coordinator.workers",
        "coordinator.proposals",
        "coordinator.canary",
    ),
    "coordinator.replicas": (
        *FLOOR,
        "coordinator.core",
        "coordinator.sessions",
        "coordinator.planner",
        "coordinator.workers",
        "coordinator.replicas",
    ),
    "coordinator.round_loop": (
        *FLOOR,
        "coordinator.core",
        "coordinator.workers",
        "coordinator.proposals",
        "coordinator.sessions.place",
    ),
    "coordinator.output": (*FLOOR, "specd.text", "coordinator.core"),
    "coordinator.coordinator": (*FLOOR, "specd.text", "specd.matching", "coordinator"),
    "coordinator.generation": (*FLOOR, "specd.text", "specd.matching", "coordinator"),
    "coordinator": (*FLOOR, "specd.v1", "specd.identity", "specd.rpc", "specd.text", "coordinator"),
    "gateway.calls": (*FLOOR, "specd.client", "gateway.http.errors", "gateway.calls"),
    "gateway.reply": (*FLOOR, "specd.client", "gateway.calls", "gateway.reply"),
    "gateway.http": (*FLOOR, "specd.identity.roles", "gateway.metrics", "gateway.http"),
    "gateway.main": (*FLOOR, "specd.identity", "specd.rpc", "specd.client", "gateway"),
    "gateway.__main__": (*FLOOR, "specd.identity"),
    "gateway.metrics": (*FLOOR, "specd.rpc"),
    "gateway": (*FLOOR, "specd.text.chat", "specd.client", "gateway"),
}
# Modules that turn messages of the protocol into plain values and back.
EDGE = {
    "coordinator.conversation",
    "coordinator.service",
    "coordinator.session_service",
    "coordinator.main",
    "coordinator.workers.stream",
    "coordinator.workers.link",
    "coordinator.workers.connection",
    "coordinator.workers.multiplexer",
    "coordinator.workers.session_calls",
}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports_of(path: Path) -> set[str]:
    """Return the modules that a module imports anywhere, as absolute names."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            modules.add(node.module or "")
            # `from package import module`
            modules.update(
                f"{node.module}.{alias.name}"
                for alias in node.names
                if (ROOT / str(node.module).replace(".", "/") / f"{alias.name}.py").is_file()
            )
    return modules


def is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def may_import(layer: str, module: str) -> bool:
    """Say whether the layer allows a module; "specd" alone stands for its own modules, not for its packages."""
    return any(
        (module == "specd" or (module.count(".") == 1 and (ROOT / "specd" / f"{module.split('.')[1]}.py").is_file()))
        if allowed == "specd"
        else is_in(module, allowed)
        for allowed in LAYERS[layer]
        if allowed != "specd" or is_in(module, "specd")
    )


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_imports_only_what_its_layer_may(path: Path) -> None:
    layer = next(layer for layer in LAYERS if is_in(name_of(path), layer))
    if path == ROOT / "specd" / "__init__.py":
        layer = "specd.client"  # whose names it has, once they are asked for
    ours = {module for module in imports_of(path) if module.split(".")[0] in PACKAGES}
    assert not {module for module in ours if not may_import(layer, module)}


def neighbours() -> dict[tuple[str, str], set[str]]:
    """Return which members of a package import which other members of it: the modules and packages in one directory."""
    found: dict[tuple[str, str], set[str]] = {}
    names = {name_of(path) for path in MODULES}
    for path in MODULES:
        importer = name_of(path).split(".")
        for module in imports_of(path):
            imported = module.split(".")
            common = next((i for i, (a, b) in enumerate(zip(importer, imported, strict=False)) if a != b), 0)
            if common and len(imported) > common and ".".join(imported[: common + 1]) in names:
                package = ".".join(importer[:common])
                found.setdefault((package, importer[common]), set()).add(imported[common])
    return found


def test_no_two_neighbours_import_each_other_even_by_way_of_others() -> None:
    """Files and packages alike: each directory has floors, and no import goes up."""
    imports = neighbours()
    reached = {start: set(direct) for start, direct in imports.items()}
    for _ in imports:
        for (package, member), beyond in reached.items():
            reached[package, member] = beyond.union(*(imports.get((package, each), set()) for each in beyond))
    assert not {f"{package}.{member}" for (package, member), beyond in reached.items() if member in beyond}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_only_the_workers_import_mlx(path: Path) -> None:
    allowed = ("specd.worker", "draft_worker", "target_worker", "specd.bench")
    uses_mlx = any(module.split(".")[0] in {"mlx", "mlx_lm"} for module in imports_of(path))
    assert not uses_mlx or any(is_in(name_of(path), package) for package in allowed)


@pytest.mark.parametrize(
    "path", [p for p in MODULES if p.parts[len(ROOT.parts)] in {"coordinator", "gateway"}], ids=name_of
)
def test_protobuf_stays_at_the_edge(path: Path) -> None:
    assert name_of(path) in EDGE or not any(is_in(module, "specd.v1") for module in imports_of(path))


def test_no_two_public_classes_have_the_same_name() -> None:
    names = Counter(
        node.name
        for path in MODULES
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert not [name for name, count in names.items() if count > 1]


def test_no_file_is_long() -> None:
    paths = [*MODULES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    assert not {path: n for path in paths if (n := len(path.read_text().splitlines())) > 400}
