"""Sessions count the memory that they hold; tests/families/test_held_memory.py has every family of mlx-lm."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from specd.worker.engine.forward import BareCache, bare_cache, enable_batches
from specd.worker.layers.owned import owned
from specd.worker.layers.session_layers import SessionLayers
from specd.worker.model.t5.arguments import Arguments
from specd.worker.model.t5.network import T5
from tests.worker.families import make_network
from tests.worker.held_memory import check_held_memory, exact_allocations
from tests.worker.t5_models import CONFIG


@pytest.mark.parametrize("name", ["gemma3_text", "jamba", "llama", "mamba2", "rwkv7"])
def test_sessions_hold_what_they_count(name: str) -> None:
    network = make_network(name)
    batches = enable_batches(network)
    check_held_memory(lambda: BareCache(network, SessionLayers(network), batches))


def test_sessions_of_a_t5_hold_what_they_count() -> None:
    network = T5(Arguments.from_dict(CONFIG))
    mx.eval(network.parameters())
    batches = enable_batches(network)
    check_held_memory(lambda: bare_cache(network, batches=batches, source=range(300)))


@given(
    arrays.arrays(
        np.float32,
        arrays.array_shapes(min_dims=3, max_dims=4, max_side=24),
        elements=st.floats(width=32, allow_nan=False),
        fill=st.just(-0.0),
    ),
    st.data(),
)
def test_an_owned_array_has_the_same_bits_and_memory_of_its_own(
    values: np.ndarray[Any, Any], data: st.DataObject
) -> None:
    with exact_allocations():
        axis = data.draw(st.integers(0, values.ndim - 1))
        begin = data.draw(st.integers(0, values.shape[axis] - 1))
        end = data.draw(st.integers(begin, values.shape[axis]))
        part = tuple(slice(begin, end) if i == axis else slice(None) for i in range(values.ndim))
        whole = mx.array(values)
        own = owned(whole[part])
        mx.eval(own)
        del whole  # with which a large array without waste shares its memory
        np.testing.assert_array_equal(np.array(own).view(np.uint32), np.ascontiguousarray(values[part]).view(np.uint32))
        held = mx.get_active_memory()
        del own
        assert held - mx.get_active_memory() == values[part].nbytes
