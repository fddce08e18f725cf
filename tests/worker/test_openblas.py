"""The copy of OpenBLAS that is kept from one start to the next."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import structlog

from specd.errors import StartupError
from specd.user_cache import user_cache_directory
from specd.worker.cpu import openblas

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere MLX has a BLAS of its own")


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory of the copy."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "specd").mkdir()
    return tmp_path / "specd"


def load_in_a_process() -> str:
    code = "from specd.worker.cpu.openblas import load_blas; print(load_blas(1))"
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_the_copy_is_of_this_architecture_and_is_used_again(kept: Path) -> None:
    assert load_in_a_process().startswith("OpenBLAS")
    (copy,) = kept.iterdir()
    assert platform.machine() in copy.name
    made_at = copy.stat().st_mtime_ns
    assert load_in_a_process().startswith("OpenBLAS")
    assert copy.stat().st_mtime_ns == made_at


@pytest.mark.parametrize("size", [0, 1000])
@pytest.mark.parametrize("is_named_after_its_size", [False, True])
def test_a_damaged_copy_is_made_again_at_once(size: int, is_named_after_its_size: bool, kept: Path) -> None:
    load_in_a_process()
    (copy,) = kept.iterdir()
    damaged = kept / f"openblas-{version('scipy-openblas32')}-{platform.machine()}-{size}.so"
    copy.write_bytes(bytes(size))
    if is_named_after_its_size:
        copy.rename(damaged)
    assert "OpenBLAS" in load_in_a_process().splitlines()[-1]
    assert [*kept.iterdir()] == [copy]
    ctypes.CDLL(str(copy))


def test_a_library_is_refused_if_any_product_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with kernels for Arm's SME, of which some products are right."""
    library = openblas._load_wheel_library()
    openblas._check_products(library, "Emulated")
    multiply, num_calls = library.cblas_sgemm, 0

    def multiply_wrongly(*arguments: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        multiply(*arguments)
        if num_calls == len(openblas._PRODUCTS):
            arguments[-2].data_as(ctypes.POINTER(ctypes.c_float))[5] += 1

    monkeypatch.setattr(library, "cblas_sgemm", multiply_wrongly)
    with pytest.raises(StartupError, match=r"wrong products .* for Emulated.* OPENBLAS_CORETYPE"):
        openblas._check_products(library, "Emulated")


def test_a_processor_with_sme_gets_the_kernels_of_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.3.34 gives wrong products there; a user's choice of kernels has priority."""
    monkeypatch.setattr(openblas, "_has_sme", lambda: True)
    for given, expected in ((None, "NEOVERSEN1"), ("ARMV8", "ARMV8")):
        monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
        if given:
            monkeypatch.setenv("OPENBLAS_CORETYPE", given)
        seen: list[str] = []

        def load(seen: list[str] = seen) -> ctypes.CDLL:
            seen.append(os.environ["OPENBLAS_CORETYPE"])
            raise OSError("not for this test")

        monkeypatch.setattr(openblas, "_load_wheel_library", load)
        monkeypatch.setattr(openblas, "_load_system_library", load)
        openblas._load_openblas(1)
        assert seen == [expected, expected]


@pytest.mark.skipif(shutil.which("unshare") is None, reason="no disk can be mounted here")
def test_on_a_full_disk_it_is_loaded_from_memory_and_leaves_nothing(kept: Path) -> None:
    """On a real disk of one MiB: LIEF writes what there is room for, and says nothing."""
    code = (
        "import os; from specd.worker.cpu.openblas import load_blas; print(load_blas(1)); "
        f"print(os.listdir({str(kept)!r}))"
    )
    script = f'mount -t tmpfs -o size=1m tmpfs "{kept}" && exec "{sys.executable}" -c "$CODE"'
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", script]
    result = subprocess.run(command, env={**os.environ, "CODE": code}, capture_output=True, text=True, check=False)
    if "unshare" in result.stderr or "mount:" in result.stderr:
        pytest.skip(f"no disk can be mounted here: {result.stderr}")
    assert "No space left on device" in result.stdout
    *_, description, left = result.stdout.splitlines()
    assert description.startswith("OpenBLAS")
    assert left == "[]"


def test_advice_to_install_is_for_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(error: Exception) -> ctypes.CDLL:
        raise error

    monkeypatch.setattr(openblas, "_load_system_library", partial(load, OSError("the system has no libopenblas")))
    for error, is_advised in ((PackageNotFoundError("scipy-openblas32"), True), (OSError("No space left"), False)):
        monkeypatch.setattr(openblas, "_load_wheel_library", partial(load, error))
        with structlog.testing.capture_logs() as logs:
            assert "reference BLAS" in openblas._load_openblas(1)
        assert ("install the package" in logs[-1]["event"]) == is_advised


def test_without_a_home_there_is_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a user id that has no name, in a container."""

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    assert user_cache_directory() is None
