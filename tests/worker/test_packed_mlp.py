"""An MLP in panels and in parts gives what the MLP gives, with the same bits on one stream and on several."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx import nn
from mlx_lm.models import gemma, llama

from specd.worker.cpu import openblas as blas
from specd.worker.cpu import streams
from specd.worker.cpu.packed_linear import pack
from specd.worker.cpu.packed_mlp import PackedMLP, pack_mlps
from specd.worker.cpu.streams import STREAMS, can_share, share_out
from tests.worker.models import small_network

on_its_core = pytest.mark.skipif(not blas.has_small_products(), reason="this OpenBLAS packs small products too")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack anywhere, leave BLAS its threads, and the cores as they were."""
    monkeypatch.setattr(blas, "has_small_products", lambda: True)
    monkeypatch.setattr(blas, "keep_to_one_thread", lambda: None)
    monkeypatch.setattr(STREAMS, "owns_all_cores", True)


def network_of(size: int, hidden: int, family: str = "llama", **arguments: Any) -> Any:
    return small_network(family, hidden_size=size, intermediate_size=hidden, vocab_size=40, **arguments)


def packed(network: Any) -> Any:
    assert [*pack(network, 40)]
    _ = [*pack_mlps(network)]
    return network


@given(
    leading=st.lists(st.integers(1, 8), min_size=0, max_size=3),
    size=st.sampled_from([8, 32, 72, 200]),
    panels=st.integers(1, 6),
    num_streams=st.integers(1, 4),
    are_free=st.booleans(),
    family=st.sampled_from(["llama", "gemma", "qwen3"]),
)
@settings(max_examples=60)
def test_a_packed_mlp_is_the_mlp(
    leading: list[int], size: int, panels: int, num_streams: int, are_free: bool, family: str
) -> None:
    network = network_of(size, 64 * panels, family)
    x = mx.random.normal((*leading, size), key=mx.random.key(1))
    expected = np.array(network.layers[0].mlp(x))
    all_streams = STREAMS.all
    STREAMS.all = (all_streams * 4)[:num_streams]
    try:
        mlp = packed(network).layers[0].mlp
        assert type(mlp) is PackedMLP
        STREAMS.owns_all_cores = are_free
        np.testing.assert_allclose(np.array(mlp(x)), expected, atol=1e-5)
    finally:
        STREAMS.all, STREAMS.owns_all_cores = all_streams, True


@on_its_core
@pytest.mark.parametrize("num_parts", [1, 2, 3, 4])
def test_a_row_has_the_same_bits_in_any_company_and_on_any_streams(num_parts: int) -> None:
    network = network_of(576, 1536)
    assert [*pack(network, 40)]
    mlp = PackedMLP(network.layers[0].mlp, num_parts)
    x = mx.random.normal((100, 576), key=mx.random.key(1))
    STREAMS.owns_all_cores = False
    together = np.array(mlp(x))
    for size in (1, 2, 3, 4, 5, 7, 8, 47, 48, 60):
        for begin in (0, 40):
            for STREAMS.owns_all_cores in (False, True):
                part = mlp(x[begin : begin + size])
                np.testing.assert_array_equal(np.array(part), together[begin : begin + size])


def test_many_rows_are_for_all_streams_also_where_units_cannot_be_parted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(STREAMS, "all", 2 * STREAMS.all[:1])
    network = network_of(64, 3 * 64)
    x = mx.random.normal((101, 64), key=mx.random.key(1))
    expected = np.array(network.layers[0].mlp(x))
    mlp = packed(network).layers[0].mlp
    assert len(mlp.parts) == 1
    shares: list[int] = []
    whole = mlp.whole
    monkeypatch.setattr(mlp, "whole", lambda groups: shares.append(groups.size // 64) or whole(groups))
    np.testing.assert_allclose(np.array(mlp(x)), expected, atol=1e-5)
    assert shares == [52, 52]


def test_the_parts_take_no_memory() -> None:
    network = network_of(64, 512)
    assert [*pack(network, 40)]
    mx.eval(network.parameters())
    before = mx.get_active_memory()
    _ = [*pack_mlps(network)]
    assert mx.get_active_memory() - before < 64 * 512 * 4


class Normed(llama.MLP):
    """Its hidden units need each other."""

    def __call__(self, x: mx.array) -> mx.array:
        hidden = nn.silu(self.gate_proj(x)) * self.up_proj(x)
        output: mx.array = self.down_proj(hidden / mx.linalg.norm(hidden, axis=-1, keepdims=True))
        return output


class Scaled(llama.MLP):
    """It has something for each hidden unit, which does not come in panels."""

    def __call__(self, x: mx.array) -> mx.array:
        output: mx.array = self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x) * mx.linspace(1, 2, 128))
        return output


class WithALayerMore(llama.MLP):
    """Its layers are not what their names suggest."""

    def __init__(self, arguments: llama.ModelArgs) -> None:
        super().__init__(arguments)
        self.more = nn.Linear(8, 8)


@pytest.mark.parametrize("kind", [Normed, Scaled, WithALayerMore])
def test_other_mlps_stay(kind: type[llama.MLP]) -> None:
    network = network_of(32, 128)
    network.layers[0].mlp = kind(network.args)
    x = mx.random.normal((1, 5, 32), key=mx.random.key(1))
    expected = np.array(network.layers[0].mlp(x))
    packed(network)
    assert type(network.layers[0].mlp) is kind
    assert type(network.layers[1].mlp) is PackedMLP
    np.testing.assert_allclose(np.array(network.layers[0].mlp(x)), expected, atol=1e-5)


@pytest.mark.parametrize("arguments", [{"mlp_bias": True}, {"intermediate_size": 100}])
def test_mlps_with_a_bias_or_with_padding_stay(arguments: dict[str, Any]) -> None:
    network = packed(small_network("llama", vocab_size=40, **arguments))
    assert type(network.layers[0].mlp) is llama.MLP


def test_a_broken_mlp_stays() -> None:
    network = network_of(32, 128)
    network.layers[0].mlp.up_proj.weight = mx.full((128, 32), mx.nan)
    packed(network)
    assert type(network.layers[0].mlp) is llama.MLP


def test_gemma_has_another_activation_and_is_packed() -> None:
    network = packed(network_of(32, 128, "gemma"))
    assert isinstance(network.layers[0].mlp.whole, gemma.MLP)


def test_few_rows_are_shared_out_where_the_cores_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(STREAMS, "all", 2 * STREAMS.all[:1])
    assert can_share(1)
    STREAMS.owns_all_cores = False
    assert not can_share(streams.ROWS_FOR_ALL_STREAMS - 1)
    assert can_share(streams.ROWS_FOR_ALL_STREAMS)
    monkeypatch.setattr(STREAMS, "all", STREAMS.all[:1])
    assert not can_share(1000)


def test_nothing_that_is_shared_out_gets_lost() -> None:
    shares = share_out([lambda i=i: mx.array(i) for i in range(3 * len(STREAMS.all))])  # type: ignore[misc]
    assert [share.item() for share in shares] == [*range(len(shares))]
