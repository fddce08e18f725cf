"""Facts that `specd models` tells of files: whole, partial, damaged and hostile ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specd.cli.models import commands
from specd.cli.models.places import Origin, State, all_places, places_in, places_in_hub, printable
from specd.cli.models.summary import ModelSummary, summary_of
from specd.cli.models.template import Tools
from specd.startup_error import StartupError
from tests.unit.growth import growth
from tests.unit.made_up_models import LLAMA, model_files, weights, write_directory, write_repository

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
WITH_TOOLS = TEMPLATE + "{% if tools %}<tool_call>{{ tool_call.name }}</tool_call>{% endif %}"


def listed(cache: Path) -> dict[str, ModelSummary]:
    return {each.name: each for each in map(summary_of, places_in_hub(cache))}


def only(cache: Path, files: dict[str, Any], **options: Any) -> ModelSummary:
    """Return the summary of a repository with these files."""
    write_repository(cache, "org/model", files, **options)
    (summary,) = listed(cache).values()
    return summary


# -- Whole models


@pytest.mark.parametrize(
    ("config", "precision", "bits"),
    [
        ({}, "bfloat16", None),
        ({"quantization": {"bits": 4, "group_size": 64}}, "4-bit affine", 4),
        ({"quantization": {"bits": 4, "mode": "mxfp4", "lm_head": {"bits": 8}}}, "4-bit mxfp4, parts 8-bit", 4),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8", None),
        ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, "3-bit gptq", 3),
        ({"torch_dtype": None, "text_config": {"dtype": "float16"}}, "float16", None),
        ({"torch_dtype": None}, None, None),
    ],
)
def test_precision(tmp_path: Path, config: Any, precision: str | None, bits: int | None) -> None:
    summary = only(tmp_path, model_files({**LLAMA, **config}))
    assert (summary.precision, summary.bits) == (precision, bits)
    assert summary.served and summary.state is State.COMPLETE, summary.reason


def test_a_whole_model(tmp_path: Path) -> None:
    files = model_files(README__md="---\nlanguage: en\nlicense: apache-2.0\n---\nText")
    summary = only(tmp_path, files)
    assert summary.as_json() == {
        "name": "org/model",
        "source": "hub",
        "path": str(tmp_path / "models--org--model" / "snapshots" / ("a" * 40)),
        "revision": "a" * 40,
        "size_bytes": sum(path.stat().st_size for path in tmp_path.glob("*/blobs/*")),
        "state": "complete",
        "served": True,
        "reason": None,
        "kind": "model",
        "family": "llama",
        "precision": "bfloat16",
        "bits": None,
        "context_length": 4096,
        "caches": summary.caches,  # tests/worker has these, because mlx-lm tells them
        "heads": [],
        "chat": False,
        "tools": "none",
        "licence": "apache-2.0",
    }


@pytest.mark.parametrize(
    ("files", "chat", "tools"),
    [
        ({}, False, Tools.NONE),
        ({"chat_template__jinja": TEMPLATE}, True, Tools.NONE),
        ({"chat_template__jinja": WITH_TOOLS}, True, Tools.READ),
        ({"chat_template__json": {"chat_template": TEMPLATE + "{{ tools }}"}}, True, Tools.TEXT),
        ({"tokenizer_config__json": {"chat_template": WITH_TOOLS}}, True, Tools.READ),
        ({"tokenizer_config__json": {"chat_template": [{"name": "default", "template": TEMPLATE}]}}, True, Tools.NONE),
        ({"tokenizer_config__json": {"chat_template": [{"name": "rag", "template": TEMPLATE}]}}, False, Tools.NONE),
        ({"tokenizer_config__json": {"chat_template": 5}}, False, Tools.NONE),
    ],
)
def test_chats_and_tools(tmp_path: Path, files: Any, chat: bool, tools: Tools) -> None:
    summary = only(tmp_path, model_files(**files))
    assert (summary.chat, summary.tools, summary.served) == (chat, tools, True)


@pytest.mark.parametrize(
    ("files", "licence"),
    [
        ({"README__md": "---\nlicense: mit\n---\n"}, "mit"),
        ({"README__md": "---\r\nlicense: 'mit' # ours\r\n---\r\n"}, "mit"),
        ({"README__md": "---\nlicense:\n- gpl-3.0\n- mit\n---\n"}, "gpl-3.0"),
        ({"README__md": "---\nlicense: [mit, bsd]\n---\n"}, "mit"),
        ({"README__md": "---\nlicense: other\nlicense_name: tongyi-qianwen\n---\n"}, "tongyi-qianwen"),
        ({"README__md": "license: mit\n"}, None),
        ({"README__md": "---\nlanguage: en\n---\nlicense: mit\n"}, None),
        ({"README__md": "---\nlicense: m\x1b[31mit\n---\n"}, "m[31mit"),
        ({"README__md": b"\xff\xfe\x00"}, None),
        ({"LICENSE": "\n   Apache License\n   Version 2.0\n"}, "Apache License"),
        ({"README__md": "no card", "LICENSE": "# MIT License"}, "MIT License"),
        ({}, None),
    ],
)
def test_licences(tmp_path: Path, files: Any, licence: str | None) -> None:
    assert only(tmp_path, model_files(**files)).licence == licence


def test_heads(tmp_path: Path) -> None:
    promising = {**LLAMA, "num_nextn_predict_layers": 1}
    models = {
        "without": model_files(),
        "beside": model_files(mtp__safetensors=weights("mtp.fc.weight")),
        "inside": model_files(promising, model__safetensors=weights("model.embed_tokens.weight", "v", "mtp.fc.weight")),
        "layer": model_files(promising, model__safetensors=weights("w", "model.layers.2.eh_proj.weight")),
        "dropped": model_files(promising, model__safetensors=weights("w", "model.layers.1.q_proj.weight")),
        "dflash": model_files({**LLAMA, "dflash_config": {}}, tokenizer__json=None),
        "own": model_files(model__safetensors=weights("fc.weight", "norm.weight"), tokenizer__json=None),
    }
    for name, files in models.items():
        write_repository(tmp_path, name, files)
    found = {name: (summary.is_head, summary.heads, summary.served) for name, summary in listed(tmp_path).items()}
    assert found == {
        "without": (False, [], True),
        "beside": (False, ["MTP"], True),
        "inside": (False, ["MTP"], True),
        "layer": (False, ["MTP"], True),
        "dropped": (False, [], True),
        "dflash": (True, ["DFlash"], True),
        "own": (True, ["MTP"], True),
    }


def test_the_latest_revision_of_main_counts(tmp_path: Path) -> None:
    root = write_repository(tmp_path, "org/model", model_files())
    write_directory(root / "snapshots" / ("b" * 40), model_files({**LLAMA, "max_position_embeddings": 8}))
    assert listed(tmp_path)["org/model"].context_length == 4096
    (root / "refs" / "main").write_text("b" * 40)
    assert listed(tmp_path)["org/model"].context_length == 8


# -- Places


def test_other_things_in_the_cache_are_no_models(tmp_path: Path) -> None:
    (tmp_path / "datasets--org--data" / "snapshots").mkdir(parents=True)
    (tmp_path / "models--a-file").write_text("")
    (tmp_path / "version.txt").write_text("1")
    assert places_in_hub(tmp_path) == []
    assert places_in_hub(tmp_path / "nowhere") == []


def test_directories_of_models(tmp_path: Path) -> None:
    for name in ("one", "owner/two", "owner/three", "a/b/too-deep", ".hidden/model"):
        write_directory(tmp_path / name, model_files())
    write_directory(tmp_path / "half", {"model.safetensors": weights()})
    assert [each.name for each in places_in(tmp_path)] == ["half", "one", "owner/three", "owner/two"]
    assert [each.name for each in places_in(tmp_path / "one")] == ["one"]
    half = next(summary_of(each) for each in places_in(tmp_path))
    assert (half.state, half.served, half.reason) == (State.PARTIAL, False, "it lacks config.json")
    with pytest.raises(StartupError, match="nowhere', which is not a directory"):
        list(places_in(tmp_path / "nowhere"))


def test_the_included_models_are_there(tmp_path: Path) -> None:
    found = {each.name: summary_of(each) for each in all_places(tmp_path, ())}
    assert [*found] == [
        "pycode-47m-4bit",
        "pycode-3.6m-8bit",
        "pycode-47m-eagle3-8bit",
        "t5-code-28m-4bit",
        "t5-code-3m-8bit",
    ]
    assert all(each.served and each.place.origin is Origin.INCLUDED for each in found.values())


# -- Partial, damaged and refused ones

SHARDS = {"weight_map": {"w": "model-1-of-2.safetensors", "v": "model-2-of-2.safetensors"}}


@pytest.mark.parametrize(
    ("files", "state", "reason"),
    [
        pytest.param(
            {
                "model__safetensors": None,
                "model-1-of-2__safetensors": weights("w"),
                "model__safetensors__index__json": SHARDS,
            },
            State.PARTIAL,
            "it lacks model-2-of-2.safetensors: 'specd models pull org/model' downloads the rest",
            id="missing shard",
        ),
        pytest.param({"model__safetensors": None}, State.PARTIAL, "it lacks the weights", id="small files only"),
        pytest.param({"config__json": None}, State.PARTIAL, "it lacks config.json", id="no config"),
        pytest.param({"config__json": "{"}, State.DAMAGED, "config.json cannot be read", id="cut config"),
        pytest.param({"config__json": "[]"}, State.DAMAGED, "config.json is not a JSON object", id="list as config"),
        pytest.param({"config__json": "[" * 100_000}, State.DAMAGED, "nested too deeply", id="deep config"),
        pytest.param(
            {"model__safetensors": weights()[:-1]}, State.DAMAGED, "is not a valid safetensors", id="cut weights"
        ),
        pytest.param({"model__safetensors": b""}, State.DAMAGED, "is not a valid safetensors", id="empty weights"),
        pytest.param(
            {"model__safetensors": None, "pytorch_model__bin": b"pickle"}, State.COMPLETE, "as pickle", id="pickle"
        ),
        pytest.param({"tokenizer__json": None}, State.COMPLETE, "has no tokenizer", id="no tokenizer"),
        pytest.param(
            {"config__json": {**LLAMA, "model_file": "own.py"}}, State.DAMAGED, "the model's own code", id="own code"
        ),
    ],
)
def test_models_that_cannot_be_served(tmp_path: Path, files: Any, state: State, reason: str) -> None:
    summary = only(tmp_path, model_files(**files))
    assert not summary.served
    assert summary.state is state
    assert reason in summary.reason
    assert str(tmp_path) not in summary.reason


@pytest.mark.parametrize("field", ["model_type", "text_config", "quantization", "quantization_config", "torch_dtype"])
@pytest.mark.parametrize("value", [None, 5, "text", [1], {"bits": "four", "mode": []}, True])
def test_values_of_other_types_are_no_crash(tmp_path: Path, field: str, value: Any) -> None:
    only(tmp_path, model_files({**LLAMA, field: value}))


@pytest.mark.parametrize(
    "field", ["max_position_embeddings", "num_nextn_predict_layers", "layer_types", "architectures"]
)
@pytest.mark.parametrize("value", [-1, "many", [[]], {"a": 1}, 1e400])
def test_numbers_of_other_types_are_no_crash(tmp_path: Path, field: str, value: Any) -> None:
    only(tmp_path, model_files({**LLAMA, field: value}))


def test_a_file_of_the_hubs_list_that_is_missing(tmp_path: Path) -> None:
    files = model_files(tokenizer__json=None)
    sizes = dict.fromkeys(
        [*files, "tokenizer.json", "onnx/model.json", "original/a.safetensors", "pytorch_model.bin"], 1
    )
    summary = only(tmp_path, files, listed=sizes)
    assert summary.state is State.PARTIAL
    assert summary.reason.startswith("it lacks tokenizer.json: ")


def test_a_download_that_has_only_begun(tmp_path: Path) -> None:
    root = tmp_path / "models--org--model"
    (root / "blobs").mkdir(parents=True)
    (root / "blobs" / "abc.incomplete").write_bytes(bytes(1000))
    (summary,) = listed(tmp_path).values()
    assert (summary.state, summary.served, summary.place.size_bytes) == (State.PARTIAL, False, 1000)


def test_damage_of_one_repository_hides_no_other(tmp_path: Path) -> None:
    write_repository(tmp_path, "org/whole", model_files())
    broken = write_repository(tmp_path, "org/broken", model_files())
    next((broken / "blobs").iterdir()).unlink()
    lost = write_repository(tmp_path, "org/lost", model_files())
    (lost / "refs" / "main").write_text("c" * 40)
    found = listed(tmp_path)
    assert {name: each.state for name, each in found.items()} == {
        "org/whole": State.COMPLETE,
        "org/broken": State.DAMAGED,
        "org/lost": State.DAMAGED,
    }
    assert "Blob missing" in found["org/broken"].reason
    assert "missing commit" in found["org/lost"].reason


def test_a_reference_that_is_no_text_hides_no_other(tmp_path: Path) -> None:
    """The hub's own scan ends at such a file."""
    write_repository(tmp_path, "org/whole", model_files())
    broken = write_repository(tmp_path, "org/broken", model_files())
    (broken / "refs" / "main").write_bytes(b"\xff\xfe")
    found = listed(tmp_path)
    assert found["org/whole"].served
    assert found["org/broken"].state is State.DAMAGED


def test_a_link_out_of_the_repository_is_not_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret.md"
    secret.write_text("---\nlicense: stolen\n---\n")
    root = write_repository(tmp_path / "cache", "org/model", model_files())
    (root / "snapshots" / ("a" * 40) / "chat_template.jinja").symlink_to(secret)
    (root / "snapshots" / ("a" * 40) / "README.md").symlink_to(secret)
    (summary,) = listed(tmp_path / "cache").values()
    assert not summary.served
    assert "is a link out of the model's directory" in summary.reason
    assert summary.licence is None


# -- Strangers' texts, names, and the time of many

HOSTILE = "\x1b]0;title\x07\x1b[31mred\u202e\n[bold]x[/bold]"


def test_control_characters_reach_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    config = {**LLAMA, "model_type": HOSTILE, "torch_dtype": HOSTILE, "quantization": {"bits": 4, "mode": HOSTILE}}
    write_repository(tmp_path, "org/model\x1b[31m", model_files(config, LICENSE=HOSTILE))
    monkeypatch.setattr(commands, "hub_cache", lambda: tmp_path)
    for show in (commands.list_models, lambda: commands.show(printable("org/model\x1b[31m"))):
        show()
        shown = capsys.readouterr().out
        assert "org/model[31m" in shown
        assert shown.count("[bold]x[/bold]") == 3  # in precision, family and reason, and not read as markup
        assert not {each for each in shown if not each.isprintable()} - {"\n"}


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("org/Qwen3-8B-4bitt", "did you mean org/Qwen3-8B-4bit"),
        ("qwen3-8b-4bit", "did you mean org/Qwen3-8B-4bit"),
        ("zzz", "'specd models list' shows the models"),
        ("\x1b[31m", "has no model '[31m'"),
    ],
)
def test_a_wrong_name_gets_near_names(tmp_path: Path, monkeypatch: Any, name: str, hint: str) -> None:
    write_repository(tmp_path, "org/Qwen3-8B-4bit", model_files())
    monkeypatch.setattr(commands, "hub_cache", lambda: tmp_path)
    with pytest.raises(StartupError) as raised:
        commands.show(name)
    assert hint in str(raised.value)


def test_time_grows_with_the_number_of_models(tmp_path: Path) -> None:
    for number in (12, 48):
        for i in range(number):
            files = model_files(
                {**LLAMA, "vocab_size": i}, chat_template__jinja=WITH_TOOLS, README__md="---\nlicense: x\n---"
            )
            write_repository(tmp_path / str(number), f"org/model-{i}", files)
    assert len(listed(tmp_path / "48")) == 48
    assert growth(lambda number: listed(tmp_path / str(number)), 12) < 8


def test_json_is_a_list(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    write_repository(tmp_path, "org/model", model_files())
    monkeypatch.setattr(commands, "hub_cache", lambda: tmp_path)
    commands.list_models(as_json=True)
    assert json.loads(capsys.readouterr().out)[0]["name"] == "org/model"
