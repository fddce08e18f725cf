"""Every family of mlx-lm: sessions count the memory that they hold."""

from __future__ import annotations

import pytest

from specd.worker.engine.forward import BareCache, enable_batches
from specd.worker.layers.session_layers import SessionLayers
from tests.worker.families import make_network
from tests.worker.family_configs import NETWORKS
from tests.worker.held_memory import check_held_memory


@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_sessions_of_a_family_hold_what_they_count(name: str) -> None:
    network = make_network(name)
    batches = enable_batches(network)
    check_held_memory(lambda: BareCache(network, SessionLayers(network), batches))
