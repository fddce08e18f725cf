"""Rules about which part may know what."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def imported_modules(path: Path) -> set[str]:
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module)
    return modules


@pytest.mark.parametrize("path", sorted((ROOT / "coordinator").glob("*.py")), ids=lambda path: path.name)
def test_the_coordinator_imports_no_mlx(path: Path) -> None:
    forbidden = {m for m in imported_modules(path) if m.split(".")[0] in {"mlx", "mlx_lm"} or "specd.worker" in m}
    assert not forbidden


def test_a_running_coordinator_has_no_mlx() -> None:
    code = "import coordinator.process, sys; print([m for m in sys.modules if m.split('.')[0] in ('mlx', 'mlx_lm')])"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


def test_the_command_line_starts_without_what_takes_long_to_import() -> None:
    """A container's health check is a new process every few seconds."""
    heavy = ("mlx", "mlx_lm", "transformers", "tokenizers", "huggingface_hub", "numpy")
    code = f"import specd.cli.app, sys; print([m for m in {heavy} if m in sys.modules])"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


@pytest.mark.parametrize("path", sorted((ROOT / "coordinator").glob("*.py")), ids=lambda path: path.name)
def test_protobuf_stays_at_the_edge(path: Path) -> None:
    edge = {
        "service.py",
        "session_service.py",
        "draft_stream.py",
        "target_stream.py",
        "worker_stream.py",
        "worker_link.py",
        "process.py",
    }
    uses_protobuf = any(module.startswith("specd.v1") for module in imported_modules(path))
    assert not uses_protobuf or path.name in edge
