"""The file of models of a coordinator: what is right comes back, and what is wrong is said with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from specd.coordinator_settings import CoordinatorSettings
from specd.model_entries import ModelEntries, ModelEntry, read_model_entries
from specd.settings import load_settings
from specd.startup_error import StartupError


def test_what_is_written_is_read(tmp_path: Path) -> None:
    entries = ModelEntries(
        (
            ModelEntry("coder", "unix:/t", "dns:drafts:50052", ("sql", "org/chat"), "1", 5, pinned=True),
            ModelEntry("org/chat-8b", "a:1,b:2", idle_seconds=3.0),
        ),
        budget_bytes=10,
    )
    (tmp_path / "models.json").write_text(entries.to_json())
    assert read_model_entries(tmp_path / "models.json") == entries


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "Invalid JSON"),
        ("[]", "the whole file"),
        ('{"models": []}', "models: "),
        ('{"models": [{"name": "a"}]}', "models.0.target: "),
        ('{"models": [{"name": "a", "target": "here"}]}', "models.0.target: "),
        ('{"models": [{"name": "a b", "target": "unix:t"}]}', "models.0.name: "),
        ('{"models": [{"name": "a", "target": "unix:t", "drafts": ""}]}', "models.0.drafts: "),
        ('{"models": [{"name": "a", "target": "unix:t", "idle_seconds": 0}]}', "models.0.idle_seconds: "),
        ('{"models": [{"name": "a", "target": "unix:t"}, {"name": "a", "target": "unix:u"}]}', "have the name 'a'"),
        ('{"models": [{"name": "a", "target": "unix:t"}, {"name": "", "target": "unix:u"}]}', "has no name"),
        ('{"models": [{"name": "/a/b", "target": "unix:t"}]}', "'/a/b' is a path: give the model a name"),
        (
            '{"models": [{"name": "a", "target": "unix:t", "num_bytes": 9}], "budget_bytes": 8}',
            "the model 'a' and the pinned ones need 9 bytes together, more than the budget of 8",
        ),
    ],
)
def test_a_wrong_file_is_an_error_with_its_place(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "models.json"
    path.write_text(content)
    with pytest.raises(StartupError) as error:
        read_model_entries(path)
    assert f"the file of models {path} is wrong: " in str(error.value)
    assert said in str(error.value)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="cannot be read: No such file"):
        read_model_entries(tmp_path / "models.json")


def test_one_model_and_several_contradict_each_other() -> None:
    with pytest.raises(StartupError, match="models and target are both set: leave out one"):
        load_settings(CoordinatorSettings, {"models": "models.json", "target": "unix:t"})
