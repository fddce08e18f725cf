"""Details of one model, and its removal from the hub's cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specd.cli.models import commands
from specd.cli.models.details import ModelDetails, details_of
from specd.cli.models.places import place_named, places_in_hub
from specd.cli.models.remove import removal_of, remove
from specd.cli.models.summary import summary_of
from specd.startup_error import StartupError
from tests.unit.made_up_models import LLAMA, WORDS, model_files, tokenizer, weights, write_directory, write_repository

OTHER_WORDS = {"a": 0, "b": 2, "c": 1}


def details(cache: Path, name: str) -> ModelDetails:
    summaries = {each.name: each for each in map(summary_of, places_in_hub(cache))}
    return details_of(summaries[name], summaries.values())


def size_on_disk(cache: Path) -> int:
    return sum(path.stat().st_size for path in cache.glob("models--*/blobs/*"))


def test_smaller_models_with_the_same_tokenizer_are_drafts(tmp_path: Path) -> None:
    models = {
        "target": model_files(model__safetensors=weights(size=1000)),
        "draft": model_files(model__safetensors=weights(size=100)),
        "smaller": model_files(model__safetensors=weights(size=10)),
        "other-words": model_files(tokenizer__json=tokenizer(OTHER_WORDS)),
        "longer": model_files(tokenizer__json=tokenizer({**WORDS, "d": 3})),
        "encoder": model_files({**LLAMA, "model_type": "t5"}),
        "broken": model_files(model__safetensors=weights()[:-1]),
        "head": model_files({**LLAMA, "dflash_config": {}}),
        "larger": model_files(model__safetensors=weights(size=2000)),
    }
    for name, files in models.items():
        write_repository(tmp_path, name, files)
    assert details(tmp_path, "target").drafts == ["smaller", "draft"]
    assert details(tmp_path, "smaller").drafts == []


def test_details_of_a_model(tmp_path: Path) -> None:
    write_repository(tmp_path, "org/model", model_files(README__md="a card"))
    found = details(tmp_path, "org/model")
    assert [*found.files] == ["config.json", "model.safetensors", "tokenizer.json"]
    assert found.files["model.safetensors"] == found.weight_bytes == len(weights())
    assert found.weight_bytes_cpu == 3 * 4 * 4
    assert found.tokenizer == "BPE, 3 tokens"
    assert found.fingerprint is not None
    assert len(found.fingerprint) == 32
    assert found.as_json()["name"] == "org/model"


@pytest.mark.parametrize(
    "files",
    [
        {"config__json": "{"},
        {"model__safetensors": None},
        {"tokenizer__json": "{"},
        {"tokenizer__json": {"added_tokens": [5]}},
    ],
)
def test_details_of_damaged_models_are_no_crash(tmp_path: Path, files: Any) -> None:
    write_repository(tmp_path, "org/model", model_files(**files))
    write_repository(tmp_path, "org/small", model_files({}))
    found = details(tmp_path, "org/model")
    assert found.drafts == []
    assert not found.summary.served
    assert found.summary.reason


def test_a_removal_frees_the_bytes_that_it_says(tmp_path: Path) -> None:
    """Repositories with the same commit, such as forks, stay."""
    root = write_repository(tmp_path, "org/model", model_files())
    (root / "blobs" / "abc.incomplete").write_bytes(bytes(1000))
    forks = [f"org/fork-{i}" for i in range(8)]
    for fork in forks:
        write_repository(tmp_path, fork, model_files())
    place = next(each for each in places_in_hub(tmp_path) if each.name == "org/model")
    removal = removal_of(place)
    before = size_on_disk(tmp_path)
    assert root.exists()
    remove(place, removal)
    assert before - size_on_disk(tmp_path) == removal.expected_freed_size
    assert [each.name for each in places_in_hub(tmp_path)] == forks
    assert all(summary_of(each).served for each in places_in_hub(tmp_path))


@pytest.mark.parametrize("is_broken", [False, True])
def test_damaged_and_partial_downloads_can_be_removed(tmp_path: Path, is_broken: bool) -> None:
    root = write_repository(tmp_path, "org/model", model_files())
    if is_broken:
        next((root / "blobs").iterdir()).unlink()
    else:
        (root / "refs" / "main").write_bytes(b"\xff")
    (place,) = places_in_hub(tmp_path)
    before = size_on_disk(tmp_path)
    removal = removal_of(place)
    assert removal.expected_freed_size == before > 0
    remove(place, removal)
    assert not root.exists()


def test_a_link_as_a_repository_loses_the_link_alone(tmp_path: Path) -> None:
    elsewhere = write_repository(tmp_path / "elsewhere", "org/model", model_files())
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / elsewhere.name).symlink_to(elsewhere)
    (place,) = places_in_hub(tmp_path / "cache")
    remove(place, removal_of(place))
    assert places_in_hub(tmp_path / "cache") == []
    assert summary_of(places_in_hub(tmp_path / "elsewhere")[0]).served


def test_directories_are_not_removed(tmp_path: Path, monkeypatch: Any) -> None:
    directory = write_directory(tmp_path / "model", model_files())
    monkeypatch.setattr(commands, "hub_cache", lambda: tmp_path / "cache")
    for name in (str(directory), "pycode-47m-4bit"):
        with pytest.raises(StartupError, match="specd does not remove directories"):
            commands.rm(name, yes=True)
    assert summary_of(place_named(str(directory), [])).served
