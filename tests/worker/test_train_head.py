"""The lessons of a head that is trained: it computes in them what it computes in a session."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np

from benchmarks.train_head import Lessons
from specd.worker.layers.session_layers import SessionLayers
from tests.worker.families import save_family
from tests.worker.head_files import network_of


def test_later_draft_tokens_are_computed_as_in_a_session(tmp_path: Path) -> None:
    """A place reads the text's pairs up to its own, and then its own draft tokens' rows, at the positions behind it."""
    mx.random.seed(0)
    directory = tmp_path / "target"
    save_family(directory, "llama")
    network = network_of(directory)
    lessons = Lessons(network, network_of(directory), json.loads((directory / "config.json").read_text()))
    head = lessons.head
    texts = lessons.read(np.random.default_rng(0).integers(0, 100, (2, 24)))
    depths = [states for _, states in lessons.drafts(head, texts, 3)]
    for text in range(2):
        for place in (0, 7, 20):
            layers = SessionLayers(head)
            token_ids = texts.token_ids[text : text + 1, 1:]
            states = head.fuse(texts.hidden[text : text + 1, : place + 1, : head.states.size])
            first, last = 0, place + 1
            for own in depths:
                states = head(token_ids[:, first:last], states, layers.caches)[:, -1:]
                layers.fed(last - first)
                assert mx.allclose(own[text, place], states[0, 0], rtol=1e-3, atol=1e-4), (text, place)
                first, last = last, last + 1
