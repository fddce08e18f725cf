"""Models that several processes hold together: their logits, what each holds, and which models are refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest

from specd.errors import StartupError
from specd.settings import EMBEDDED_TARGET
from specd.worker.model.loader import load
from specd.worker.model.sharding import Shard
from specd.worker.ranks.data_plane import free_port
from tests.thorough import examples
from tests.worker.divisible_models import save_divisible
from tests.worker.models import save_random_model
from tests.worker.rank_process import passes

ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-4
SECONDS = 120


def on_ranks(number: int, model: str, directory: Path) -> list[tuple[dict[str, Any], list[np.ndarray]]]:
    """Return the facts and the logits of each rank."""
    addresses = ",".join(f"127.0.0.1:{free_port('127.0.0.1')}" for _ in range(number))
    command = [sys.executable, "-m", "tests.worker.rank_process"]
    files = [directory / f"{rank}.npz" for rank in range(number)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    running = [
        subprocess.Popen(
            [*command, str(rank), addresses, model, str(file)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, file in enumerate(files)
    ]
    try:
        outputs = [process.communicate(timeout=SECONDS)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0] * number
    return [
        (json.loads(output.splitlines()[-1]), [np.load(file)[name] for name in np.load(file).files])
        for output, file in zip(outputs, files, strict=True)
    ]


@pytest.mark.parametrize(
    ("name", "number"),
    examples([("llama", 2), ("gpt_oss", 3), ("qwen3", 2), ("llama", 3), ("qwen3", 3), ("gpt_oss", 2)], 3),
)
def test_logits_are_those_of_the_whole_model(name: str, number: int, tmp_path: Path) -> None:
    model = save_divisible(tmp_path / "model", name)
    whole = load(model, blas="")
    expected = passes(whole)
    ranks = on_ranks(number, model, tmp_path)
    for facts, logits in ranks:
        assert facts["batches"] is whole.batches is True
        assert facts["device"].endswith(f", {number} ranks by ring")
        assert facts["bytes_per_token"] == whole.cache_footprint.bytes_for(1) // number
        for own, first, all_of in zip(logits, ranks[0][1], expected, strict=True):
            assert np.abs(own - all_of).max() <= TOLERANCE
            assert (own == first).all()  # all ranks have the same bits
    assert max(np.abs(each).max() for each in expected) > 1


def test_a_rank_reads_its_part_alone(tmp_path: Path) -> None:
    """The weights of the layers are 100 MB, of which a rank of three holds a third, and the embedding."""
    sizes = {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 4, "head_dim": 64, "vocab_size": 1024}
    model = save_divisible(tmp_path / "model", "llama", **sizes)
    weights = cast("dict[str, mx.array]", mx.load(str(tmp_path / "model" / "model.safetensors")))
    in_layers = sum(weight.nbytes for name, weight in weights.items() if "layers" in name)
    a_layer = in_layers / 4
    beside = sum(weight.nbytes for name, weight in weights.items() if "layers" not in name)
    assert in_layers > 90e6
    for facts, _ in on_ranks(3, model, tmp_path):
        assert facts["peak_bytes"] < in_layers / 3 + beside + 2 * a_layer


class TwoRanks:
    """Stands for the group of a rank that never meets the other one."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0


def refusal_of(model: str) -> str:
    part = Shard(TwoRanks(), "ring", lambda _: None)
    with pytest.raises(StartupError) as raised:
        load(model, blas="", part=part)
    return str(raised.value)


def test_models_that_cannot_be_divided_are_refused_by_name(tmp_path: Path) -> None:
    refusal = refusal_of(EMBEDDED_TARGET)
    assert f"the model {EMBEDDED_TARGET} cannot be divided among 2 ranks" in refusal
    assert "heads is 9, which 2 does not divide" in refusal
    mamba = save_random_model(tmp_path / "mamba2", "mamba2")
    assert "mlx-lm's class of its architecture, mamba2, has no shard()" in refusal_of(mamba)
    odd = save_divisible(tmp_path / "odd", "llama", intermediate_size=193)
    assert "cannot be divided among 2 ranks: " in refusal_of(odd)
