"""The outline of a model, before its weights are read."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specd.model_info import ModelInfo, encoder_conflict, tokenizer_conflict
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_T5_DRAFT, EMBEDDED_T5_TARGET, EMBEDDED_TARGET
from specd.startup_error import StartupError
from specd.worker.model.outline import Outline, check_pair, outline_of

WORDS = {"a": 0, "b": 1, "c": 2}


def weights() -> bytes:
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(4)


def model(directory: Path, *, vocabulary: Any = WORDS, model_type: str = "llama", **files: Any) -> Outline:
    """Write a model's files, and return its outline."""
    directory.mkdir()
    tokenizer = {"model": {"type": "BPE", "vocab": vocabulary}, "added_tokens": files.pop("added_tokens", [])}
    contents = {"config": {"model_type": model_type}, "tokenizer": tokenizer, **files}
    for name, content in contents.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    (directory / "model.safetensors").write_bytes(weights())
    return outline_of(str(directory))


@pytest.mark.parametrize(
    ("pair", "has_encoder"),
    [((EMBEDDED_TARGET, EMBEDDED_DRAFT), False), ((EMBEDDED_T5_TARGET, EMBEDDED_T5_DRAFT), True)],
)
def test_the_included_pairs_fit(pair: tuple[str, str], has_encoder: bool) -> None:
    target, draft = map(outline_of, pair)
    check_pair(target, draft)
    assert target.has_encoder == draft.has_encoder == has_encoder
    assert len(target.vocabulary) == 8192
    assert not target.has_template


@pytest.mark.parametrize("name", ["mistral", "phi-msft", "gpt2", "mt5", "qwen3_next"])
def test_names_of_classes_are_mlx_lms_and_ours(tmp_path: Path, name: str) -> None:
    assert model(tmp_path / "model", model_type=name).has_encoder == (name == "mt5")


def test_another_class_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"mlx-lm has no class for the model type '\.\./utils'"):
        model(tmp_path / "model", model_type="../utils")


@pytest.mark.parametrize("config", [{"max_position_embeddings": -1}, {"n_positions": "512"}, {"text_config": 5}])
def test_wrong_values_of_a_config_are_named(tmp_path: Path, config: Any) -> None:
    with pytest.raises(StartupError, match=next(iter(config))):
        model(tmp_path / "model", config={"model_type": "llama", **config})


@pytest.mark.parametrize(
    ("target", "draft", "difference"),
    [
        ({"vocabulary": WORDS}, {"vocabulary": {"a": 0, "b": 2, "c": 1}}, "token 'b' is id 1 in .* and id 2 in"),
        ({"vocabulary": WORDS}, {"vocabulary": {"a": 0, "b": 1}}, "token 'c' is id 2 in .* and missing in"),
        ({"vocabulary": {"a": 0}}, {"vocabulary": WORDS}, "token 'b' is id 1 in .* and missing in"),
        ({"vocabulary": [["a", -1.0], ["b", -2.0]]}, {"vocabulary": [["b", -1.0], ["a", -2.0]]}, "token 'a' is id 0"),
    ],
)
def test_other_tokens_are_named(tmp_path: Path, target: Any, draft: Any, difference: str) -> None:
    outlines = model(tmp_path / "target", **target), model(tmp_path / "draft", **draft)
    with pytest.raises(StartupError, match=f"have different tokenizers .{difference}"):
        check_pair(*outlines)


def test_the_words_are_those_of_the_coordinator(tmp_path: Path) -> None:
    """It refuses a pair of models that workers have loaded."""
    outlines = model(tmp_path / "target"), model(tmp_path / "draft", model_type="t5")
    target, draft = (
        ModelInfo(each.name, "", "", "", 3, 512, (), "", "", decoder_start_token_id=0 if each.has_encoder else None)
        for each in outlines
    )
    with pytest.raises(StartupError) as refused:
        check_pair(*outlines)
    assert str(refused.value) == encoder_conflict(target, draft) != ""
    with pytest.raises(StartupError) as refused:
        check_pair(outlines[0], model(tmp_path / "other", vocabulary={**WORDS, "d": 3}))
    difference = f"token 'd' is id 3 in {tmp_path / 'other'} and missing in {target.name}"
    assert str(refused.value) == tokenizer_conflict(target, replace(draft, name=str(tmp_path / "other")), difference)


@pytest.mark.parametrize(
    "draft",
    [
        {"vocabulary": [["a", -1.0], ["b", -2.0], ["c", -3.0]]},
        # What was added, and by which file, transformers knows.
        {"added_tokens": [{"id": 3, "content": "<new>"}]},
        {"vocabulary": {"a": 0, "b": 1}, "added_tokens": [{"id": 2, "content": "c"}]},
        {"vocabulary": {"a": 0, "b": 1}, "tokenizer_config": {"added_tokens_decoder": {"2": {"content": "c"}}}},
    ],
)
def test_the_same_tokens_said_otherwise_are_the_same(tmp_path: Path, draft: Any) -> None:
    check_pair(model(tmp_path / "target"), model(tmp_path / "draft", **draft))


@pytest.mark.parametrize(
    ("files", "has_template"),
    [({}, False), ({"tokenizer_config": {"chat_template": "{{ x }}"}}, True), ({"chat_template": {}}, True)],
)
def test_a_template_is_found(tmp_path: Path, files: Any, has_template: bool) -> None:
    assert model(tmp_path / "model", **files).has_template == has_template


@pytest.mark.parametrize("vocabulary", [{"a": "x"}, [["a"]], 5, {"a": None}])
def test_a_broken_tokenizer_is_refused_in_words(tmp_path: Path, vocabulary: Any) -> None:
    with pytest.raises(StartupError, match=r"tokenizer\.json is not a tokenizer"):
        model(tmp_path / "model", vocabulary=vocabulary)
