"""The locks name versions and hashes, no address, and the images get what is tested."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
LOCKS = ROOT / "deploy" / "locks"


@pytest.mark.parametrize("path", [ROOT / "requirements.lock", *LOCKS.glob("*.lock")], ids=lambda p: p.stem)
def test_a_lock_has_hashes_and_no_address(path: Path) -> None:
    lock = path.read_text()
    assert "://" not in lock
    pinned = [line for line in lock.splitlines() if "==" in line]
    assert pinned
    assert all(line.endswith("\\") for line in pinned)  # a hash follows


def locked(path: Path) -> dict[str, set[str]]:
    """Return the versions of each package in a lock; there can be one for each version of Python."""
    versions: dict[str, set[str]] = {}
    for name, version in re.findall(r"^([\w.-]+)==([\w.]+)", path.read_text(), re.MULTILINE):
        versions.setdefault(name, set()).add(version)
    return versions


def test_images_have_what_pyproject_asks_for_in_the_versions_that_are_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tested = locked(ROOT / "requirements.lock")
    locks = {name: locked(LOCKS / f"{name}.lock") for name in ("coordinator", "worker", "worker-cuda")}

    for requirement in map(Requirement, [*project["dependencies"], *project["optional-dependencies"]["serve"]]):
        versions = locks["worker"][requirement.name]
        assert all(requirement.specifier.contains(version) for version in versions)
    assert locks["worker"].items() <= tested.items()

    for_workers = {
        "greenlet",
        "psutil",
        "mlx",
        "mlx-cpu",
        "mlx-metal",
        "sentencepiece",
        "scipy-openblas32",
        "lief",
        "hf-xet",
    }
    for_tracing = {name: v for name, v in locks["coordinator"].items() if name.startswith("opentelemetry-")}
    assert for_tracing
    assert for_tracing.items() <= tested.items()
    for_sessions = {name: tested[name] for name in ("async-timeout", "redis")}
    common = {name: v for name, v in locks["worker"].items() if name not in for_workers}
    assert locks["coordinator"] == {**common, **for_tracing, **for_sessions}

    assert "mlx-cpu" not in locks["worker-cuda"]
    assert locks["worker-cuda"]["mlx-cuda-13"] == locks["worker-cuda"]["mlx"] == tested["mlx"]
    missing = {name for name in locks["worker"] if name not in locks["worker-cuda"]}
    assert missing == {"mlx-cpu"}
