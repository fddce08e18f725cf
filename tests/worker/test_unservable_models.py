"""Models that the loader refuses, each with a line that names the model and the reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specd.errors import StartupError
from specd.settings import EMBEDDED_DRAFT
from specd.worker.model.loader import load


def copy_of_the_draft(directory: Path, *, without: str = "", config: dict[str, Any] | None = None) -> Path:
    """Copy the embedded draft, without one of its files, with other values in its config."""
    shutil.copytree(EMBEDDED_DRAFT, directory)
    if without:
        (directory / without).unlink()
    if config is not None:
        original = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({**original, **config}))
    return directory


def with_pickled_weights(directory: Path) -> Path:
    copy_of_the_draft(directory, without="model.safetensors")
    (directory / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    return directory


def with_file_content(name: str, content: bytes) -> Callable[[Path], Path]:
    def make(directory: Path) -> Path:
        copy_of_the_draft(directory)
        (directory / name).write_bytes(content)
        return directory

    return make


def with_half_of_the_weights(directory: Path) -> Path:
    copy_of_the_draft(directory)
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    return directory


def just_a_file(path: Path) -> Path:
    path.write_text("weights")
    return path


UNSERVABLE_MODELS = [
    pytest.param(lambda directory: directory, "name a local directory", id="nothing there"),
    pytest.param(just_a_file, "is a file: name the directory", id="a file"),
    pytest.param(lambda d: copy_of_the_draft(d, without="config.json"), "has no config.json", id="no config"),
    pytest.param(lambda d: copy_of_the_draft(d, without="model.safetensors"), "has no weights", id="no weights"),
    pytest.param(
        lambda d: copy_of_the_draft(d, without="tokenizer.json"),
        "model has no tokenizer.json: download",
        id="no tokenizer",
    ),
    pytest.param(with_pickled_weights, "pytorch_model.bin", id="pickled weights"),
    pytest.param(with_file_content("model.safetensors", b"\xff" * 999), "model.safetensors", id="corrupt weights"),
    pytest.param(with_half_of_the_weights, "Download or convert the model again", id="half of the weights"),
    pytest.param(with_file_content("config.json", b"{"), "config.json cannot be read", id="config is not JSON"),
    pytest.param(with_file_content("config.json", b"[]"), "config.json is not a JSON object", id="config is a list"),
    pytest.param(with_file_content("config.json", b"{}"), "model_type", id="config is empty"),
    pytest.param(with_file_content("tokenizer.json", b"{}"), "cannot load the model", id="tokenizer is empty"),
    pytest.param(lambda d: copy_of_the_draft(d, config={"model_type": "nosuch"}), "nosuch", id="unknown architecture"),
    pytest.param(lambda d: copy_of_the_draft(d, config={"model_type": "olmo"}), "needs a package", id="package"),
    pytest.param(
        lambda d: copy_of_the_draft(d, config={"num_hidden_layers": 3}), "Missing", id="weights of another shape"
    ),
    pytest.param(
        lambda d: copy_of_the_draft(d, config={"num_hidden_layers": 10**9}), "num_hidden_layers", id="endless layers"
    ),
    pytest.param(
        lambda d: copy_of_the_draft(d, config={"num_attention_heads": 0}), "cannot load the model", id="absurd config"
    ),
    pytest.param(lambda d: copy_of_the_draft(d, config={"model_file": "run_me.py"}), "run_me.py", id="code of its own"),
]


@pytest.mark.parametrize(("make_model", "named"), UNSERVABLE_MODELS)
def test_it_is_refused(make_model: Callable[[Path], Path], named: str, tmp_path: Path) -> None:
    model = str(make_model(tmp_path / "model"))
    with pytest.raises(StartupError) as refused:
        load(model, blas="")
    message = str(refused.value)
    assert model in message
    assert named in message
