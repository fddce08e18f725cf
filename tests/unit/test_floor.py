"""The floor of the unit tests: no MLX, no processes."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["mlx", "mlx.core", "mlx_lm"])
def test_mlx_cannot_be_imported(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in {"mlx", "mlx_lm"}]:
        monkeypatch.delitem(sys.modules, name)  # there are such where tests of other floors run too
    with pytest.raises(ImportError, match="belongs in tests/worker"):
        importlib.import_module(module)


def test_this_floor_by_itself_leaves_mlx_alone(request: pytest.FixtureRequest) -> None:
    if all(item.get_closest_marker("unit") for item in request.session.items):
        assert not {"mlx", "mlx.core", "mlx_lm"} & set(sys.modules)


def test_no_process_can_be_started() -> None:
    with pytest.raises(RuntimeError, match="belongs in tests/e2e"):
        subprocess.run([sys.executable, "-c", ""], check=True)
    with pytest.raises(RuntimeError, match="belongs in tests/e2e"):
        os.system("true")
