"""`specd convert` keeps a target's head, which mlx-lm's converter drops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from specd.worker.model.loader import read
from tests.worker.head_files import FAMILIES, GROUP, Target, embed, raw_head, rounded, save_target
from tests.worker.test_convert import convert
from tests.worker.test_head_loader import difference, load


@pytest.mark.parametrize(("family", "bits"), [*((family, None) for family in FAMILIES), ("qwen3_5", 4)])
def test_a_converted_target_keeps_its_head(family: str, bits: int | None, tmp_path: Path) -> None:
    source = save_target(tmp_path / "source", family, is_raw=True)
    head = raw_head(source.text)
    embed(source.directory, head, "pt")
    result = convert(source.directory, tmp_path / "out", bits=bits, group_size=GROUP)
    assert "head" not in result
    network, _, _ = read("out", tmp_path / "out")
    network.set_dtype(mx.float32)
    target = Target(tmp_path / "out", network, source.text)
    assert difference(load(target), target, rounded(head, bits) if bits else head) < 1e-4


def test_a_cast_target_casts_its_head(tmp_path: Path) -> None:
    source = save_target(tmp_path / "source", "qwen3_5", is_raw=True)
    embed(source.directory, raw_head(source.text), "pt")
    convert(source.directory, tmp_path / "out", dtype="bfloat16")
    tensors: Any = mx.load(str(tmp_path / "out" / "mtp.safetensors"))
    assert {tensor.dtype for tensor in tensors.values()} == {mx.bfloat16}


def test_a_promise_without_a_head_is_said_and_converted(tmp_path: Path) -> None:
    source = save_target(tmp_path / "source", "qwen3_5")
    result = convert(source.directory, tmp_path / "out")
    assert "without a head: " in result
    assert "which mtp_num_hidden_layers in its config.json promises" in result
    assert not (tmp_path / "out" / "mtp.safetensors").exists()
