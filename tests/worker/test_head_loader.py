"""Heads in every layout in which they are published, and those that do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from structlog.testing import capture_logs

from specd.errors import StartupError
from specd.vocabulary import OWN_HEAD
from specd.worker.engine.merged_products import merge_products
from specd.worker.heads.head import Head
from specd.worker.heads.trials import head_logits
from specd.worker.layers.session_layers import SessionLayers
from specd.worker.model.files import check_files, is_head
from specd.worker.model.head_loader import load_head, read_head
from specd.worker.model.loader import load as load_model
from specd.worker.model.loader import read
from tests.worker.families import save_family
from tests.worker.family_configs import NETWORKS
from tests.worker.gpt2_models import save_gpt2, weights_on_the_hub
from tests.worker.head_files import (
    FAMILIES,
    Target,
    Tensors,
    converted,
    embed,
    raw_head,
    rounded,
    save_apart,
    save_beside,
    save_target,
    stacked,
)
from tests.worker.head_reference import states_of
from tests.worker.models import small_network

IDS = [[5, 9, 100, 7, 8000, 3, 44, 2]]
NEXT = [[9, 100, 7, 8000, 3, 44, 2, 77]]


def difference(head: Head, target: Target, raw: Tensors) -> float:
    """Return the largest difference between a head's logits and the reference's, of all pairs of a text."""
    _, hidden = head.states.run(mx.array(IDS), SessionLayers(target.network).caches)
    following = mx.array(NEXT)
    logits = head.logits(head(following, hidden, SessionLayers(head).caches))[0]
    embedded = np.array(head.states.embed(following)[0])
    states = states_of(raw, target.text, embedded, np.array(hidden[0]))
    expected = np.array(head.states.logits(mx.array(states.astype(np.float32))))
    assert np.std(expected) > 0.1
    return float(np.abs(np.array(logits) - expected).max())


def load(target: Target, name: str | None = None) -> Head:
    check_files(target.directory)
    head = load_head(target.network, target.directory, batches=False, name=name or OWN_HEAD)
    assert head is not None
    return head


def _without_mark(target: Target, head: Tensors) -> None:
    """Add a head to the file of a converted target, which shows by its convolutions that it is converted."""
    path = str(target.directory / "model.safetensors")
    weights: Any = mx.load(path)
    mx.eval(weights)
    mx.save_safetensors(path, weights | head)


def _raw_apart(target: Target, head: Tensors) -> str:
    directory = target.directory.parent / "raw"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"text_config": dict(target.text)}))
    embed(directory, head, "pt")
    return str(directory)


# How a head is saved; each returns what `--self-draft` names, if anything.
Save = Callable[[Target, Tensors], str | None]
RAW: dict[str, Save] = {
    "embedded": lambda target, head: embed(target.directory, head, "pt"),
    "embedded, experts stacked": lambda target, head: embed(target.directory, stacked(head), "pt"),
}
LAYOUTS: dict[str, Save] = {
    "embedded": lambda target, head: embed(target.directory, converted(head), "mlx"),
    "embedded without a mark": lambda target, head: _without_mark(target, converted(head)),
    "under the language model's name": lambda target, head: embed(
        target.directory, {f"language_model.{name}": tensor for name, tensor in converted(head).items()}, "mlx"
    ),
    "mtp.safetensors": lambda target, head: save_beside(target.directory, "mtp.safetensors", converted(head)),
    "model-mtp.safetensors": lambda target, head: save_beside(
        target.directory, "model-mtp.safetensors", converted(head)
    ),
    "mtp/weights.safetensors": lambda target, head: save_beside(
        target.directory, "mtp/weights.safetensors", converted(head)
    ),
    "raw beside a converted target": lambda target, head: save_beside(target.directory, "mtp.safetensors", head, "pt"),
    "apart": lambda target, head: save_apart(target.directory.parent / "head", converted(head), target.text, None),
    "raw and apart": _raw_apart,
}


@pytest.mark.parametrize(
    ("family", "layout"), [(name, "embedded") for name in FAMILIES] + [("qwen3_5_moe", "embedded, experts stacked")]
)
def test_a_raw_head_gives_the_references_logits(family: str, layout: str, tmp_path: Path) -> None:
    target = save_target(tmp_path / "target", family, is_raw=True)
    head = raw_head(target.text)
    RAW[layout](target, head)
    assert difference(load(target), target, head) < 1e-4


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_gives_the_references_logits_in_every_layout(family: str, layout: str, tmp_path: Path) -> None:
    target = save_target(tmp_path / "target", family)
    head = raw_head(target.text)
    assert difference(load(target, LAYOUTS[layout](target, head)), target, head) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_gives_the_references_logits_with_merged_products(family: str, tmp_path: Path) -> None:
    target = save_target(tmp_path / "target", family)
    head = raw_head(target.text)
    loaded = load(target, LAYOUTS["mtp.safetensors"](target, head))
    assert merge_products(loaded, lambda: head_logits(loaded, batches=False))
    assert difference(loaded, target, head) < 1e-4


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_quantised_head_gives_the_logits_of_its_rounded_weights(family: str, bits: int, tmp_path: Path) -> None:
    """The router of experts keeps 8 bits; nothing in the config tells it."""
    target = save_target(tmp_path / "target", family)
    head = raw_head(target.text)
    save_beside(target.directory, "mtp.safetensors", converted(head, bits=bits), None)
    loaded = load(target)
    assert not [part for part in loaded.modules() if hasattr(part, "bits")]  # as a target on a CPU
    assert difference(loaded, target, rounded(head, bits)) < 1e-4
    assert difference(loaded, target, head) > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_gives_the_references_logits_for_a_target_as_a_worker_loads_it(family: str, tmp_path: Path) -> None:
    """With the forms that are faster on this CPU, and for several sessions at once."""
    target = save_target(tmp_path / "target", family)
    head = raw_head(target.text)
    embed(target.directory, converted(head), "mlx")
    model = load_model(str(target.directory), blas="", is_optimized=True)
    loaded = load_head(model.network, target.directory, batches=model.batches)
    assert loaded is not None and model.batches
    assert difference(loaded, replace(target, network=model.network), head) < 1e-4


def test_a_head_beside_the_target_comes_before_one_in_its_files(tmp_path: Path) -> None:
    target = save_target(tmp_path / "target", "qwen3_5")
    first, second = raw_head(target.text), raw_head(target.text, seed=1)
    embed(target.directory, converted(first), "mlx")
    save_beside(target.directory, "mtp.safetensors", converted(second))
    assert difference(load(target), target, second) < 1e-4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return save_target(tmp_path_factory.mktemp("models") / "target", "qwen3_5_moe")


def changed(head: Tensors, fault: str) -> Tensors:
    head = dict(head)
    match fault:
        case "missing":
            del head["mtp.fc.weight"]
        case "unknown":
            head["mtp.embed_tokens.weight"] = mx.zeros((8192, 32))
        case "shape":
            head["mtp.fc.weight"] = mx.zeros((32, 48))
        case "layers":
            head |= {name.replace("layers.0", "layers.1"): tensor for name, tensor in head.items()}
        case "experts":
            head = {name: tensor for name, tensor in head.items() if ".experts.2." not in name}
        case "halves":
            head = stacked(head)
            head["mtp.layers.0.mlp.experts.gate_up_proj"] = mx.zeros((4, 31, 32))
        case "bits":
            head = converted(head, bits=4)
            head["mtp.fc.scales"] = mx.zeros((32, 1), mx.uint8)
        case "scales":
            head = converted(head, bits=4)
            head["mtp.fc.scales"] = mx.zeros((32, 0))
    return head


FAULTS = {
    "missing": "it lacks fc.weight",
    "unknown": "it also has embed_tokens.weight",
    "shape": r"other shapes than the target needs: fc.weight \[32, 48\] instead of \[32, 64\]",
    "layers": r"it also has layers.1.input_layernorm.weight, .* and 13 more",
    "experts": r"layers.0.mlp.switch_mlp.gate_proj.weight \[3, 16, 32\] instead of \[4, 16, 32\]",
    "halves": "experts or a quantisation of unknown form",
    "bits": "experts or a quantisation of unknown form: Cannot infer the quantization mode of fc",
    "scales": "experts or a quantisation of unknown form",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_head_that_does_not_fit_is_refused_by_the_name_of_its_tensors(
    target: Target, fault: str, tmp_path: Path
) -> None:
    head = changed(raw_head(target.text), fault)
    (tmp_path / "config.json").write_text("{}")
    embed(tmp_path, head, "pt")
    with pytest.raises(StartupError, match=FAULTS[fault]) as raised:
        load(target, str(tmp_path))
    assert "Download or convert the head again" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_head_of_a_larger_target_is_refused(target: Target, tmp_path: Path) -> None:
    head = raw_head({**target.text, "hidden_size": 64})
    with pytest.raises(StartupError, match=r"fc.weight \[64, 128\] instead of \[32, 64\]"):
        load(target, save_apart(tmp_path / "head", converted(head), target.text))


def test_a_broken_head_in_the_targets_own_directory_is_left_out_with_a_reason(tmp_path: Path) -> None:
    target = save_target(tmp_path / "target", "qwen3_5")
    save_beside(target.directory, "mtp.safetensors", changed(converted(raw_head(target.text)), "missing"))
    with capture_logs() as logs:
        assert load_head(target.network, target.directory, batches=False) is None
    assert "it lacks fc.weight" in logs[-1]["reason"]


def test_a_file_that_is_not_safetensors_is_left_out_with_a_reason(tmp_path: Path) -> None:
    target = save_target(tmp_path / "target", "qwen3_5")
    (target.directory / "mtp.safetensors").write_bytes(b"\xff" * 64)
    with capture_logs() as logs:
        assert load_head(target.network, target.directory, batches=False) is None
    assert "mtp.safetensors is not a valid safetensors file" in logs[-1]["reason"]


def test_a_promise_without_tensors_gives_one_line_with_the_remedy(target: Target) -> None:
    with capture_logs() as logs:
        assert load_head(target.network, target.directory, batches=False) is None
    assert [log["event"] for log in logs] == ["the target does not draft for itself"]
    reason = logs[0]["reason"]
    assert "mtp_num_hidden_layers" in reason and "--self-draft" in reason and "\n" not in reason


def test_a_target_without_a_promise_is_silent(target: Target, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with capture_logs() as logs:
        assert load_head(small_network("llama"), tmp_path, batches=False) is None
    assert not logs


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, about fields that mlx-lm wants
@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_a_model_of_any_family_is_searched_for_a_head(name: str, tmp_path: Path) -> None:
    save_family(tmp_path / name, name)
    network, _, _ = read(name, tmp_path / name, lazy=True)
    assert read_head(network, tmp_path / name) is None


def test_a_family_without_such_heads_is_refused(target: Target, tmp_path: Path) -> None:
    apart = save_apart(tmp_path / "head", converted(raw_head(target.text)), target.text)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    with pytest.raises(StartupError, match="heads for qwen2 are not known"):
        load_head(small_network("qwen2"), tmp_path, batches=False, name=apart)


def test_a_target_that_changes_its_logits_is_refused(tmp_path: Path) -> None:
    """Its output layer does not make its logits, so a head would draft with others."""
    target = save_target(tmp_path / "target", "qwen3_5")
    plain = type(target.network)
    capped = {"__call__": lambda self, *args, **options: mx.tanh(plain.__call__(self, *args, **options))}
    target.network.__class__ = type("Capped", (plain,), capped)
    with pytest.raises(StartupError, match="hidden states do not give its logits"):
        load(target, save_apart(tmp_path / "head", converted(raw_head(target.text)), target.text))


def test_a_directory_without_a_head_is_refused(target: Target, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(StartupError, match=r"has no tensors of a head \(such as mtp\.\*\)\. Name a directory"):
        load(target, str(tmp_path))


def test_a_link_out_of_the_directory_is_refused(tmp_path: Path) -> None:
    """As for all files of a model, in the folder of a head too."""
    target = save_target(tmp_path / "target", "qwen3_5")
    save_beside(tmp_path, "elsewhere.safetensors", converted(raw_head(target.text)))
    (target.directory / "mtp").mkdir()
    (target.directory / "mtp" / "weights.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
    with pytest.raises(StartupError, match="is a link out of the model's directory"):
        check_files(target.directory)
    with capture_logs() as logs:
        assert load_head(target.network, target.directory, batches=False) is None
    assert "is a link out of the model's directory" in logs[-1]["reason"]


@pytest.mark.parametrize("prefix", ["", "mtp.", "model.mtp.", "language_model.mtp."])
def test_a_head_is_known_by_its_fusion(prefix: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {f"{prefix}fc.weight": mx.zeros((2, 4))})
    assert is_head(tmp_path)


def test_a_gpt2_is_no_head_though_its_layers_are_named_like_a_fusion(tmp_path: Path) -> None:
    assert not is_head(Path(save_gpt2(tmp_path / "model", weights_on_the_hub(""))))
