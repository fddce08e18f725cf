"""The caches that `specd models` tells of a config, without MLX, are those of the network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from specd.cli.models.cache_facts import FULL_ATTENTION, cache_kinds, cache_numbers_per_token
from specd.cli.models.details import details_of
from specd.cli.models.places import ModelPlace, Origin
from specd.cli.models.summary import summary_of
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.worker.engine.forward import bare_cache
from specd.worker.model.loader import load
from tests.worker.families import describe, make_config, make_network
from tests.worker.family_configs import NETWORKS

_FLOAT32_BYTES = 4
FAMILIES = sorted(NETWORKS)
TOLD = [name for name in FAMILIES if cache_kinds(make_config(name)) is not None]
COUNTED = [name for name in FAMILIES if cache_numbers_per_token(make_config(name)) is not None]


@pytest.mark.parametrize("name", TOLD)
def test_kinds_that_are_told_are_right(name: str) -> None:
    assert ", ".join(cache_kinds(make_config(name)) or ()) == describe(name)[0]


@pytest.mark.parametrize("name", COUNTED)
def test_memory_that_is_told_is_right(name: str) -> None:
    network = make_network(name)
    layers = bare_cache(network).layers
    network(mx.array([[0]]), cache=layers.caches)
    told = cache_numbers_per_token(make_config(name)) or 0
    assert layers.footprint.bytes_for(1000) == 1000 * told * _FLOAT32_BYTES


def test_most_families_are_told() -> None:
    assert len(TOLD) > 0.6 * len(FAMILIES)
    assert len(COUNTED) > 0.3 * len(FAMILIES)


@pytest.mark.parametrize("name", [EMBEDDED_TARGET, EMBEDDED_DRAFT])
def test_memory_of_an_included_model(name: str) -> None:
    directory = Path(name)
    model = load(name, blas="test")
    place = ModelPlace(directory.name, Origin.INCLUDED, directory, directory, 0)
    details = details_of(summary_of(place), ())
    loaded: Any = tree_flatten(model.network.parameters())
    assert details.weight_bytes_cpu == sum(weight.nbytes for _, weight in loaded)
    assert details.cache_bytes_per_token_cpu == model.cache_footprint.bytes_for(1)
    assert details.fingerprint == model.info.fingerprint
    assert details.summary.context_length == model.info.context_length
    assert details.summary.caches == [FULL_ATTENTION]
