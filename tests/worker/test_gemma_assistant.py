"""Assistants of Gemma 4: logits, exact texts, proposals of the session's tokens alone, and those that do not fit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

from specd.sampling import Acceptance, Sampling
from specd.startup_error import StartupError
from specd.worker.engine.forward import BareCache, forward
from specd.worker.engine.jobs import Feed
from specd.worker.heads.gemma_assistant import GemmaAssistant
from specd.worker.heads.head import attach_head
from specd.worker.heads.reader import Reader
from specd.worker.layers.full import quantize_caches
from specd.worker.layers.session_layers import SessionLayers
from specd.worker.model.files import is_head
from specd.worker.model.head_loader import load_head, read_head
from specd.worker.model.loader import LoadedModel, load
from specd.worker.session.head_draft import HeadDraft
from tests.worker.assistant_files import FORMS, FULL, SLIDING, Form, Tensors, assistant_tensors
from tests.worker.assistant_reference import AssistantReference
from tests.worker.driving import Driven, finish
from tests.worker.families import save_family
from tests.worker.head_files import network_of, save_repository
from tests.worker.test_self_draft import COSTS, Caller, decode_all, prompts_of, serving


@pytest.fixture(scope="module", params=FORMS)
def form(request: pytest.FixtureRequest) -> Form:
    return FORMS[request.param]


@pytest.fixture(scope="module")
def target(form: Form, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save_family(tmp_path_factory.mktemp("models") / "target", form.family, **form.changes))


def text_of(num_tokens: int) -> list[int]:
    return mx.random.randint(0, 8192, [num_tokens], key=mx.random.key(num_tokens)).tolist()  # type: ignore[return-value]


def inner(network: Any) -> Any:
    return getattr(network, "language_model", network).model


def seen_by(network: Any, token_ids: Sequence[int], sources: Mapping[str, int]) -> tuple[mx.array, dict[str, Any]]:
    """Return the target's last state [size] of a text, and the keys and values of all tokens, by mlx-lm alone."""
    caches: list[Any] = [KVCache() for _ in SessionLayers(network).caches]
    states = inner(network)(mx.array([[*token_ids]]), cache=caches)
    n = len(token_ids)
    return states[0, -1], {
        kind: (caches[i].keys[..., :n, :], caches[i].values[..., :n, :]) for kind, i in sources.items()
    }


def chain_by_hand(
    config: Mapping[str, Any],
    tensors: Tensors,
    network: Any,
    seen: tuple[mx.array, Mapping[str, Any]],
    token_ids: Sequence[int],
    next_token: int,
    k: int,
) -> list[np.ndarray[Any, Any]]:
    """Return the logits of a chain of k tokens after a text and its next token, from the target's state and rows."""
    state, rows = seen
    reference = AssistantReference(config, tensors, {kind: (k[0], v[0]) for kind, (k, v) in rows.items()})
    embeddings, last = np.array(inner(network).embed_tokens.weight, np.float64), np.array(state, np.float64)
    return reference.chain(embeddings, last, next_token, len(token_ids) - 1, k)


def expected_logits(
    form: Form, tensors: Tensors, network: Any, token_ids: Sequence[int], next_token: int, k: int
) -> list[np.ndarray[Any, Any]]:
    seen = seen_by(network, token_ids, form.sources)
    return chain_by_hand(form.config, tensors, network, seen, token_ids, next_token, k)


def begin_session(head: Any, token_ids: Sequence[int], *, rejected: int = 0) -> SessionLayers:
    """Feed a session in chunks. Rejected draft tokens stay behind its tokens, as after a verify."""
    layers = SessionLayers(head.states.network)
    for fed in (token_ids[:-3], token_ids[-3:-1], [token_ids[-1], *text_of(rejected)]):
        if fed:
            (rows,) = forward([Feed(BareCache(head.states.network, layers, batches=False), mx.array([*fed]))])
            reader_of(layers).saw(rows)
    return layers


def reader_of(layers: SessionLayers) -> Reader:
    assert isinstance(layers.companion, Reader)
    return layers.companion


def drafted_logits(layers: SessionLayers, token_ids: Sequence[int], next_token: int, k: int) -> list[mx.array]:
    reader, end = reader_of(layers), len(token_ids)
    logits = [finish(reader.first_logits(layers, [token_ids[-1], next_token], end - 1, k))]
    while len(logits) < k:
        logits.append(finish(reader.next_logits(mx.argmax(logits[-1], axis=-1))))
    return [each[0] for each in logits]


def attached(network: Any, target: Path, place: Path) -> Any:
    head = read_head(network, target, place)
    assert head is not None
    attach_head(network, head)
    return head


def assert_logits(logits: Sequence[mx.array], expected: Sequence[np.ndarray[Any, Any]]) -> None:
    for own, theirs in zip(logits, expected, strict=True):
        drafts = np.isfinite(theirs)
        values = np.array(own)
        assert theirs[drafts].std() > 0.3
        assert values[~drafts].max(initial=-1e30) < -1e29
        np.testing.assert_allclose(values[drafts], theirs[drafts], atol=1e-4)


@pytest.mark.parametrize(("length", "rejected"), [(1, 0), (5, 3), (40, 5), (700, 30)])
def test_a_published_head_gives_the_logits_by_hand(
    form: Form, target: Path, length: int, rejected: int, tmp_path: Path
) -> None:
    """With texts longer than the window of 8, and than the rows that a cache keeps; and after a copy and a rewind."""
    network, tensors, text = network_of(target), assistant_tensors(form.config), text_of(length)
    expected = expected_logits(form, tensors, network, text, 77, 4)
    copied = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    save_repository(tmp_path / "head", form.config, copied)
    assert is_head(tmp_path / "head")
    head = attached(network, target, tmp_path / "head")
    layers = begin_session(head, text, rejected=rejected)
    assert_logits(drafted_logits(layers, text, 77, 4), expected)
    copy = layers.copy(length - 1)
    assert layers.rewind(length - 1) == length - 1
    for again in (layers, copy):
        (rows,) = forward([Feed(BareCache(network, again, batches=False), mx.array(text[-1:]))])
        reader_of(again).saw(rows)
        assert_logits(drafted_logits(again, text, 77, 4), expected)


@pytest.mark.parametrize("length", [5, 40])
def test_a_head_equals_that_of_mlx_vlm(form: Form, target: Path, length: int, tmp_path: Path) -> None:
    """mlx-vlm gets the rows of all tokens: `pip install --no-deps mlx-vlm` is enough."""
    drafters = pytest.importorskip("mlx_vlm.speculative.drafters.gemma4_assistant", reason="mlx-vlm is not installed")
    network, tensors, text = network_of(target), assistant_tensors(form.config), text_of(length)
    theirs = drafters.Model(drafters.ModelConfig.from_dict(form.config))
    theirs.load_weights(list(theirs.sanitize(tensors).items()))
    theirs.bind(inner(network))
    state, rows = seen_by(network, text, form.sources)
    theirs.set_shared_kv(rows, length, position=length - 1, kv_valid_len=length)
    tokens, expected = mx.array([[77]]), []
    for _ in range(3):
        embedded = inner(network).embed_tokens(tokens) * inner(network).embed_scale
        pair = mx.concatenate([embedded, state.reshape(1, 1, -1)], axis=-1)
        state, logits = theirs(pair, rows, mx.array([[length - 1]]))
        tokens = mx.argmax(logits, axis=-1)
        values = np.array(logits[0, 0], np.float64)
        expected.append(np.where(values == values.min(), -np.inf, values) if form.is_ordered else values)
    save_repository(tmp_path / "head", form.config, tensors)
    head = attached(network, target, tmp_path / "head")
    assert_logits(drafted_logits(begin_session(head, text), text, 77, 3), expected)


def test_a_quantised_head_gives_the_logits_of_its_rounded_weights(form: Form, target: Path, tmp_path: Path) -> None:
    network, tensors, text = network_of(target), assistant_tensors(form.config), text_of(20)
    saved, rounded = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            packed, scales, biases = mx.quantize(tensor, 32, 8)
            base = name.removesuffix("weight")
            saved |= {name: packed, f"{base}scales": scales, f"{base}biases": biases}
            rounded[name] = mx.dequantize(packed, scales, biases, 32, 8)
    expected = expected_logits(form, rounded, network, text, 77, 3)
    save_repository(tmp_path / "head", form.config, saved)
    head = attached(network, target, tmp_path / "head")
    assert_logits(drafted_logits(begin_session(head, text), text, 77, 3), expected)


def test_a_head_reads_quantised_keys_and_values(tmp_path: Path) -> None:
    """Layers that share keys and values cannot: mlx-lm does not tell them that these are quantised."""
    form, changes = FORMS["31B"], {"head_dim": 32, "global_head_dim": 32}
    target = Path(save_family(tmp_path / "target", form.family, **form.changes, **changes))
    config = form.config | {"text_config": form.config["text_config"] | changes}
    network, tensors, text = network_of(target), assistant_tensors(config), text_of(40)
    quantize_caches(network, bits=8, group_size=32)
    save_repository(tmp_path / "head", config, tensors)
    layers = begin_session(attached(network, target, tmp_path / "head"), text)
    rows = {kind: layers.caches[i].between(0, len(text)) for kind, i in form.sources.items()}  # type: ignore[attr-defined]
    rows[FULL] = [mx.dequantize(w, scales, biases, 32, 8) for w, scales, biases in rows[FULL]]
    expected = chain_by_hand(config, tensors, network, (reader_of(layers).arrays[0][-1], rows), text, 77, 3)
    assert_logits(drafted_logits(layers, text, 77, 3), expected)


@pytest.mark.parametrize("batches", [False, True])
def test_several_sessions_get_the_logits_of_each_alone(batches: bool, form: Form, target: Path, tmp_path: Path) -> None:
    network, tensors = network_of(target), assistant_tensors(form.config)
    save_repository(tmp_path / "head", form.config, tensors)
    head = attached(network, target, tmp_path / "head")
    head.batches = batches
    texts = [text_of(length) for length in (40, 3, 12)]
    sessions = [begin_session(head, text, rejected=2) for text in texts]
    jobs = [
        Driven(reader_of(layers).first_logits(layers, [text[-1], 77], len(text) - 1, 1))
        for layers, text in zip(sessions, texts, strict=True)
    ]
    Driven.step_together(jobs)
    for job, text in zip(jobs, texts, strict=True):
        assert_logits(job.result, expected_logits(form, tensors, network, text, 77, 1))


def with_head(form: Form, target: Path, tmp_path: Path) -> LoadedModel:
    tensors = {
        name: w.astype(mx.bfloat16) if w.dtype == mx.float32 else w
        for name, w in assistant_tensors(form.config).items()
    }
    model = load(str(target), blas="", is_optimized=True, head=save_repository(tmp_path / "head", form.config, tensors))
    assert model.head is not None
    assert model.head.batches
    assert isinstance(model.head.network, GemmaAssistant)
    return model


def fresh_proposal(model: LoadedModel, tokens: Sequence[int], k: int) -> list[int]:
    """Return the greedy proposal of a session that gets all tokens at once."""
    assert model.head is not None
    layers = begin_session(model.head.network, tokens[:-1])
    return [int(mx.argmax(each)) for each in drafted_logits(layers, tokens[:-1], tokens[-1], k)]


async def test_texts_are_those_of_the_target_alone(form: Form, target: Path, tmp_path: Path) -> None:
    model = with_head(form, target, tmp_path)
    assert model.head is not None
    for temperature in (0.0, 1.0):
        sampling, prompts = Sampling(temperature=temperature, seed=2), prompts_of(2, 4)
        async with serving(None, model) as service:
            expected, _ = await decode_all(service, sampling, prompts, (0,), seed=2, is_erratic=False)
        async with serving(HeadDraft(model.head.info, COSTS), model) as service:
            for is_erratic in (False, True):
                said, callers = await decode_all(service, sampling, prompts, (0, 1, 4), seed=2, is_erratic=is_erratic)
                assert {fault for each in callers for fault in each.faults} <= {""}
                assert any(each.proposals for each in callers)
                assert said == expected


@pytest.mark.parametrize("form", ["E4B"], indirect=True)
async def test_rejection_proposes_only_from_the_best_clusters(form: Form, target: Path, tmp_path: Path) -> None:
    model = with_head(form, target, tmp_path)
    assert model.head is not None
    sampling = Sampling(temperature=1.0, seed=1, acceptance=Acceptance.REJECTION)
    async with serving(HeadDraft(model.head.info, COSTS), model) as service:
        _, callers = await decode_all(service, sampling, prompts_of(1, 2), (1,), seed=1, is_erratic=False)
    network: Any = model.head.network
    for caller in callers:
        for length, proposal in caller.proposals[::4]:
            tokens = caller.tokens[:length]
            (logits,) = drafted_logits(begin_session(network, tokens[:-1]), tokens[:-1], tokens[-1], 1)
            assert all(float(logits[token]) > -1e29 for token in proposal)
    assert {fault for each in callers for fault in each.faults} == {""}


async def test_proposals_are_those_of_a_fresh_session(form: Form, target: Path, tmp_path: Path) -> None:
    """After rejected, replaced and superseded tokens, in batches, and with prefixes of ended sessions: as a replay."""
    model, proposals = with_head(form, target, tmp_path), list[tuple[list[int], list[int]]]()
    assert model.head is not None
    async with serving(HeadDraft(model.head.info, COSTS), model) as service:
        for seed in range(3):  # the first leaves its caches to the others
            _, callers = await decode_all(service, Sampling(), prompts_of(7, 3), (0, 2, 5), seed=seed, is_erratic=True)
            assert {fault for each in callers for fault in each.faults} <= {""}
            proposals += [(each.tokens[:length], own) for each in callers for length, own in each.proposals if own]
    assert len(proposals) > 60
    for tokens, own in proposals[::2]:
        assert own == fresh_proposal(model, tokens, len(own))


@pytest.mark.parametrize("form", ["E4B"], indirect=True)
async def test_proposals_are_the_same_in_the_form_of_a_gpu(form: Form, target: Path, tmp_path: Path) -> None:
    """With whole buffers. MLX cannot compile a Gemma 4, which copies its position."""
    model = with_head(form, target, tmp_path)
    assert model.head is not None
    prompts = prompts_of(9, 2)
    async with serving(None, model) as service:
        expected, _ = await decode_all(service, Sampling(), prompts, (0,), seed=9, is_erratic=False)
    model.network.fixed_shapes = True
    async with serving(HeadDraft(model.head.info, COSTS), model, runs_ahead=True) as service:
        said, callers = await decode_all(service, Sampling(), prompts, (0, 2, 5), seed=9, is_erratic=True)
    assert said == expected
    proposals = [(each.tokens[:length], own) for each in callers for length, own in each.proposals if own]
    assert len(proposals) > 10
    for tokens, own in proposals[::3]:
        assert own == fresh_proposal(model, tokens, len(own))


class Late(Random):
    """Asks for no tokens in the first 100 rounds."""

    num_rounds = 0

    def choice(self, seq: Any) -> Any:
        self.num_rounds += 1
        return 0 if self.num_rounds <= 100 else super().choice(seq)


@pytest.mark.parametrize("form", ["E4B"], indirect=True)
@pytest.mark.parametrize("count", [1, 2])
async def test_rounds_without_a_proposal_lose_no_state(count: int, form: Form, target: Path, tmp_path: Path) -> None:
    """A single session also runs ahead in them."""
    model = with_head(form, target, tmp_path)
    assert model.head is not None
    async with serving(HeadDraft(model.head.info, COSTS), model, runs_ahead=True) as service:
        callers = [Caller(service, Sampling(), Late(i), [5, 3, i]) for i in range(count)]
        await asyncio.gather(*(each.decode(130, ks=(3,), is_erratic=False) for each in callers))
    for each in callers:
        assert {*each.faults} == {""}
        for length, own in each.proposals[::5]:
            assert own == fresh_proposal(model, each.tokens[:length], 3)


FAULTS: dict[str, tuple[Mapping[str, Any], Callable[[Tensors], Tensors], str]] = {
    "missing": ({}, lambda w: {n: t for n, t in w.items() if n != "pre_projection.weight"}, "it lacks pre_projection"),
    "keys": ({}, lambda w: w | {"model.layers.0.self_attn.k_proj.weight": mx.zeros(3)}, "also has layers.0.self_attn"),
    "shape": ({}, lambda w: w | {"model.norm.weight": mx.zeros(9)}, r"norm.weight \[9\] instead of \[32\]"),
    "state": ({"backbone_hidden_size": 64}, lambda w: w, "states of size 64, and this one's is 32"),
    "vocabulary": ({"vocab_size": 9000}, lambda w: w, "a vocabulary of size 9000, and this one's is 8192"),
    "window": ({"sliding_window": 16}, lambda w: w, "a window of size 16, and this one's is 8"),
    "heads": ({"head_dim": 16}, lambda w: w, "sliding_attention has 4 heads of size 16, and the target's keys have 2"),
    "kind": ({"layer_types": [SLIDING, "linear", FULL]}, lambda w: w, "reads layers with linear, and the target has"),
    "types": ({"layer_types": [FULL]}, lambda w: w, "IndexError.*probably because of its config.json"),
    "untied": ({"tie_word_embeddings": False}, lambda w: w, "tie_word_embeddings is false"),
    "inputs": ({"hidden_size_per_layer_input": 8}, lambda w: w, "hidden_size_per_layer_input is 8"),
    "clusters": ({"num_centroids": 60}, lambda w: w, "it takes 5 of 60 clusters of 8192 tokens"),
    "ordering": (
        {}, lambda w: w | {"masked_embedding.token_ordering": mx.zeros(8192, mx.int32)}, "does not have each token once"
    ),
    "another type": ({"hidden_size": "32"}, lambda w: w, "probably because of its config.json"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("form", ["E4B"], indirect=True)
def test_a_head_that_does_not_fit_is_refused_with_the_reason(
    fault: str, form: Form, target: Path, tmp_path: Path
) -> None:
    changes, change, reason = FAULTS[fault]
    config = form.config
    for name, value in changes.items():
        (config if name in config else config["text_config"])[name] = value
    save_repository(tmp_path / "head", config, change(assistant_tensors(form.config)))
    with pytest.raises(StartupError, match=reason):
        load_head(network_of(target), target, batches=False, name=str(tmp_path / "head"))


def test_a_target_of_another_family_is_refused(tmp_path: Path) -> None:
    form = FORMS["E4B"]
    target = Path(save_family(tmp_path / "target", "gemma3_text"))
    save_repository(tmp_path / "head", form.config, assistant_tensors(form.config))
    with pytest.raises(StartupError, match="the assistant of a Gemma 4, and the target is not one"):
        load_head(network_of(target), target, batches=False, name=str(tmp_path / "head"))
