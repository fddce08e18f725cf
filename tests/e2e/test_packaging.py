"""The wheel works away from the repository."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_BYTES = 100e6  # of a file on PyPI, unless one asks for more

CODE = """
from pathlib import Path
import specd
from specd.bench.prompts import load_prompts
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
for path in (specd.__file__, EMBEDDED_DRAFT, EMBEDDED_TARGET):
    print(Path(path).exists(), path)
print(len(load_prompts()))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the installed wheel."""
    directory = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(directory)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = directory.glob("*.whl")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target"]
    subprocess.run([*install, str(directory / "site"), str(wheel)], check=True, capture_output=True)
    return directory / "site"


def test_an_installed_wheel_finds_its_models_and_prompts(installed: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, "-c", CODE]
    output = subprocess.run(command, cwd=installed, env=environment, check=True, capture_output=True, text=True).stdout
    *paths, num_prompts = output.splitlines()
    assert all(line.startswith(f"True {installed}") for line in paths)
    assert int(num_prompts) >= 20


def test_the_wheel_has_the_model_card_and_the_licence(installed: Path) -> None:
    assert (installed / "specd" / "models" / "README.md").is_file()
    assert list(installed.glob("specd-*.dist-info/licenses/LICENSE"))


def test_the_wheel_is_small_enough_for_an_index(installed: Path) -> None:
    (wheel,) = installed.parent.glob("*.whl")
    assert 20e6 < wheel.stat().st_size < MOST_BYTES  # the included models are in it


def test_the_wheel_has_the_page_of_the_gateway(installed: Path) -> None:
    shipped = {path.name for path in (installed / "gateway" / "static").iterdir()}
    assert "index.html" in shipped
    assert shipped == {path.name for path in (ROOT / "gateway" / "static").iterdir()}
