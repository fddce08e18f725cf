"""The fingerprint of a model: every byte of its files, computed once for as long as they stay as they are."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from specd.settings import EMBEDDED_DRAFT
from specd.worker.model import fingerprint
from specd.worker.model.fingerprint import hashed_files, quick_fingerprint, whole_fingerprint


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache, an empty one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "specd"


@pytest.fixture
def directory(tmp_path: Path, cache: Path) -> Path:
    """A copy of the embedded draft whose files have not changed for a while."""
    copy = Path(shutil.copytree(EMBEDDED_DRAFT, tmp_path / "model"))
    time.sleep(0.05)
    return copy


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a file count as settled as soon as it is written."""
    monkeypatch.setattr(fingerprint, "_SETTLED_SECONDS", 0.0)


def whole(directory: Path) -> str:
    return whole_fingerprint(hashed_files(directory)).result(timeout=60)


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_single_bit_of_any_file_changes_it(name: str, directory: Path) -> None:
    before = whole(directory)
    assert len(before) == 64
    assert whole(directory) == before
    flip(directory / name, (directory / name).stat().st_size // 2)
    assert whole(directory) != before


def test_the_quick_one_misses_what_is_between_its_samples(directory: Path) -> None:
    before = quick_fingerprint(directory), whole(directory)
    flip(directory / "model.safetensors", 100_000)
    assert quick_fingerprint(directory) == before[0]
    assert whole(directory) != before[1]


def test_files_that_decide_nothing_do_not_count(directory: Path) -> None:
    before = whole(directory)
    (directory / "README.md").write_text("A model.")
    (directory / "eval_results.json").write_text("{}")
    assert whole(directory) == before


@pytest.mark.usefixtures("settled")
def test_it_is_kept_while_the_files_stay_as_they_are(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = whole(directory)
    monkeypatch.setattr(fingerprint, "digest_of", lambda _: pytest.fail("it was known"))
    assert whole_fingerprint(hashed_files(directory)).result(timeout=0) == before


@pytest.mark.usefixtures("settled")
def test_a_file_whose_times_are_set_back_is_read_again(directory: Path) -> None:
    weights = directory / "model.safetensors"
    before, status = whole(directory), weights.stat()
    with weights.open("r+b") as file:  # in place: same size, same inode
        file.seek(100_000)
        byte = file.read(1)[0]
        file.seek(100_000)
        file.write(bytes([byte ^ 1]))
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert weights.stat().st_mtime_ns == status.st_mtime_ns
    assert whole(directory) != before


def test_a_file_that_has_just_changed_is_not_kept(directory: Path, cache: Path) -> None:
    os.utime(directory / "config.json")
    whole(directory)
    assert not list(cache.glob("fingerprint-*"))


@pytest.mark.usefixtures("settled")
def test_a_damaged_cache_is_read_over(directory: Path, cache: Path) -> None:
    before = whole(directory)
    (kept,) = cache.glob("fingerprint-*")
    kept.write_bytes(b"\xff" * 64)
    assert whole(directory) == before
    assert kept.read_text() == before


def test_a_file_that_changes_after_the_load_gives_none(directory: Path) -> None:
    """The model in memory is the earlier one."""
    files = hashed_files(directory)
    flip(directory / "model.safetensors", 100_000)
    assert whole_fingerprint(files).result(timeout=60) == ""
