"""Namespaces of the prefix cache: none sees another, or loses its share to one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specd.worker.session.prefix_cache import PrefixCache
from tests.worker.prefixes import PLENTY, Watch, contents, layers_of, same, token_lists

pytestmark = pytest.mark.usefixtures("small_sizes")

namespaces = st.sampled_from([b"", b"a", b"b"])


@given(
    st.lists(st.tuples(namespaces, token_lists(1, 8)), max_size=12),
    st.lists(st.tuples(namespaces, token_lists(0, 8)), max_size=6),
)
def test_a_namespace_finds_what_it_would_if_it_were_alone(
    entries: list[tuple[bytes, list[int]]], queries: list[tuple[bytes, list[int]]]
) -> None:
    shared = PrefixCache(PLENTY)
    alone = {namespace: PrefixCache(PLENTY) for namespace in (b"", b"a", b"b")}
    for namespace, token_ids in entries:
        shared.store(token_ids, layers_of(token_ids), namespace)
        alone[namespace].store(token_ids, layers_of(token_ids), namespace)
    watch = Watch(shared, PLENTY)
    for namespace, query in queries:
        watch.look()
        found, expected = (prefixes.take(query, (), namespace) for prefixes in (shared, alone[namespace]))
        assert (found is None) is (expected is None)
        if found is not None and expected is not None:
            assert same(contents(found), contents(expected))
    assert shared.num_entries == sum(prefixes.num_entries for prefixes in alone.values())


@given(st.lists(st.tuples(namespaces, token_lists(1, 12)), max_size=30), st.integers(1, 20))
def test_who_holds_no_more_than_an_equal_share_loses_nothing_to_another(
    entries: list[tuple[bytes, list[int]]], num_blocks: int
) -> None:
    block = layers_of([0]).nbytes
    prefixes = PrefixCache(num_blocks * block)
    watch = Watch(prefixes, num_blocks * block)

    def held(namespace: bytes) -> int:
        return sum(entry.nbytes for entry in prefixes._entries if entry.namespace == namespace)

    for namespace, token_ids in entries:
        before = {other: held(other) for other in (b"", b"a", b"b") if other != namespace}
        prefixes.store(token_ids, layers_of(token_ids), namespace)
        watch.look()
        for other, nbytes in before.items():
            # But for the entry, of at most three blocks, with which it had more than its share.
            assert held(other) >= min(nbytes, (num_blocks // 3 - 3) * block)
