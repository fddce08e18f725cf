"""Configs with values that no model has: the model is refused with a sentence, or served with that value."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from specd.errors import StartupError
from specd.worker.model.loader import load
from tests.worker.driving import idle_worker
from tests.worker.models import copy_variant, save_random_model
from tests.worker.t5_models import save_t5

FIELDS = (
    *("text_config", "quantization", "quantization_config", "rope_scaling", "rope_parameters", "layer_types"),
    *(
        "eos_token_id",
        "pad_token_id",
        "decoder_start_token_id",
        "n_positions",
        "max_position_embeddings",
        "torch_dtype",
    ),
)
values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2),
    st.sampled_from([10**9, 2**32, 2**64, -(2**70), 0.5, float("inf"), float("nan"), "x", "\ud800"]),
    st.lists(st.sampled_from([0, -1, 2**32, "x", None]), max_size=3),
    st.dictionaries(st.sampled_from(["type", "bits", "x"]), st.sampled_from([0, -1, "x", None]), max_size=2),
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("models")
    return {
        "gemma3_text": save_random_model(directory / "gemma3_text", "gemma3_text"),
        "t5": save_t5(directory / "t5"),
    }


@pytest.mark.parametrize("kind", ["gemma3_text", "t5"])
@settings(max_examples=25)
@given(st.data())
def test_any_value_of_any_field_gives_a_model_or_a_sentence(
    kind: str, saved: dict[str, str], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    config = json.loads((Path(saved[kind]) / "config.json").read_text())
    field = data.draw(st.sampled_from([*FIELDS, *sorted(config)]))
    changes = {"config.json": {field: data.draw(values)}}
    directory = copy_variant(saved[kind], tmp_path_factory.mktemp("changed") / "model", changes)
    try:
        info = idle_worker(load(directory, blas="")).description.model
    except StartupError as refused:
        assert directory in str(refused)
    else:
        assert all(token < info.vocabulary_size for token in info.eos_token_ids)
        assert info.decoder_start_token_id < info.vocabulary_size
        assert info.context_length > 0


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        ("gemma3_text", {"text_config": 5}, "text_config is 5"),
        ("gemma3_text", {"max_position_embeddings": -1}, "max_position_embeddings is -1"),
        ("t5", {"n_positions": "many"}, "n_positions is 'many'"),
    ],
)
def test_a_sentence_names_the_field(
    kind: str, changes: dict[str, Any], named: str, saved: dict[str, str], tmp_path: Path
) -> None:
    with pytest.raises(StartupError, match=named):
        load(copy_variant(saved[kind], tmp_path / "model", {"config.json": changes}), blas="")


@pytest.mark.parametrize(("token_ids", "taken"), [([0, 999999], (0,)), ([7, -1, 2**32], (0, 7)), (-1, (0,))])
def test_only_tokens_of_the_vocabulary_end_a_text(
    token_ids: Any, taken: tuple[int, ...], saved: dict[str, str], tmp_path: Path
) -> None:
    """`min_tokens` suppresses the end tokens, and a worker refuses a token that it has no logit for."""
    changes = {name: {"eos_token_id": token_ids} for name in ("config.json", "generation_config.json")}
    directory = copy_variant(saved["gemma3_text"], tmp_path / "model", changes)
    with structlog.testing.capture_logs() as logs:
        assert load(directory, blas="").info.eos_token_ids == taken
    assert [entry["event"] for entry in logs if "end tokens" in entry["event"]] != []


@pytest.mark.parametrize("token_id", [999999, -1, True, "x"])
def test_an_answer_begins_with_a_token_of_the_vocabulary(token_id: Any, saved: dict[str, str], tmp_path: Path) -> None:
    changes = {"config.json": {"decoder_start_token_id": token_id, "pad_token_id": 3}}
    assert load(copy_variant(saved["t5"], tmp_path / "model", changes), blas="").info.decoder_start_token_id == 3


def test_what_no_message_can_carry_ends_the_start(saved: dict[str, str]) -> None:
    model = load(saved["gemma3_text"], blas="")
    assert idle_worker(model).description.model.context_length == 512
    for changes in ({"context_length": -1}, {"eos_token_ids": (2**32,)}, {"architecture": "\ud800"}):
        with pytest.raises(StartupError, match="cannot be described to other processes"):
            idle_worker(replace(model, info=replace(model.info, **changes)))
    with pytest.raises(StartupError, match="cannot be described to other processes"):
        idle_worker(replace(model, tokenizer_config=replace(model.tokenizer_config, chat_template="\ud800")))
