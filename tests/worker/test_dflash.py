"""Block drafters in the forms in which they are published: their logits, exact texts, and those that do not fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.base import create_attention_mask

from specd.sampling import Acceptance, Sampling
from specd.startup_error import StartupError
from specd.worker.heads.dflash.context import Context
from specd.worker.heads.dflash.head import DFlashHead
from specd.worker.layers.session_layers import SessionLayers
from specd.worker.model import head_trial
from specd.worker.model.files import is_head
from specd.worker.model.head_loader import load_head, read_head
from specd.worker.model.head_trial import HeadTrial
from specd.worker.model.loader import LoadedModel, load
from specd.worker.sampling.distribution import decode_distributions
from specd.worker.sampling.sampler import Sampler
from specd.worker.session.head_draft import HeadDraft
from specd.worker.session.proposal import DraftedTokens, draft_tokens
from tests.thorough import examples
from tests.worker.dflash_forms import FORMS, ROWS, SIZE, Form, Tensors, weights
from tests.worker.dflash_reference import Reference
from tests.worker.dflash_session import Session
from tests.worker.driving import finish
from tests.worker.families import save_family
from tests.worker.head_files import network_of, save_repository
from tests.worker.test_self_draft import COSTS, Caller, decode_all, prompts_of, serving


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "target"
    save_family(directory, "qwen3")
    return directory


def head_of(network: Any, target: Path, directory: Path, form: Form) -> DFlashHead:
    save_repository(directory, form.config, weights(form))
    head: Any = read_head(network, target, directory)
    assert isinstance(head, DFlashHead)
    return head


def states_of(network: Any, form: Form, text: Sequence[int]) -> np.ndarray[Any, Any]:
    """Return the states [n, reads * size] of a text that a head reads, computed layer by layer."""
    x = network.model.embed_tokens(mx.array([text]))
    passed = [x[0]]
    for layer, cache in zip(network.layers, SessionLayers(network).caches, strict=True):
        x = layer(x, mask=create_attention_mask(x, cache), cache=cache)
        passed.append(x[0])
    return np.array(mx.concatenate([passed[i] for i in form.reads], axis=-1))


def check(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any], tolerance: float = 1e-4) -> None:
    drafts = np.isfinite(expected)
    assert drafts.any(axis=-1).all()
    assert found[~drafts].max(initial=-1e30) < -1e29
    assert expected[drafts].std() > 0.3
    np.testing.assert_allclose(
        found[drafts], expected[drafts], atol=tolerance * max(1.0, float(expected[drafts].std()))
    )


@pytest.mark.parametrize("has_fixed_shapes", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_a_published_head_gives_the_logits_by_hand(
    name: str, has_fixed_shapes: bool, target: Path, tmp_path: Path
) -> None:
    """In several rounds, with a context in parts and a rewind; as on a GPU, attention can read whole buffers."""
    form, network = FORMS[name], network_of(target)
    network.fixed_shapes = has_fixed_shapes
    head = head_of(network, target, tmp_path / "head", form)
    assert is_head(tmp_path / "head")
    assert head.most_draft_tokens == form.most
    reference = Reference(form, weights(form), np.array(network.model.embed_tokens.weight))
    session = Session(head)

    def round_of(next_token: int, n: int) -> list[int]:
        drafted, rows = session.draft(next_token, n)
        check(rows, reference.rows(states_of(network, form, session.text), next_token, drafted))
        return drafted

    session.feed([5, 9, 100, 7, 8000])
    session.read(3)
    session.feed([3, 44, 2])
    drafted = round_of(77, 3)
    session.feed([77, *drafted[:2]])
    round_of(12, form.most)
    round_of(13, 1)  # with nothing new in the context
    session.rewind(6)
    session.feed([1, 2, 3, 4, 5, 6, 7, 8])
    session.read(4)
    session.feed([4])
    round_of(9, 2)
    round_of(9, form.most)


THEIRS = {
    "z-lab's DFlash": "qwen3_dflash",
    "a causal DFlash with sinks": "qwen3_dflash",
    "DFlash 2": "dflash2",
    "DeepSpec's DSpark": "dspark",
    "SpecForge's DSpark": "dspark",
    "LiquidAI's DSpark": "dspark",
}


@pytest.mark.parametrize("name", THEIRS)
def test_a_head_equals_that_of_mlx_vlm(name: str, target: Path, tmp_path: Path) -> None:
    """Those of its forms that mlx-vlm has: `pip install --no-deps mlx-vlm` is enough.

    Where a window hides a part of the context from the last tokens of a block only, mlx-vlm hides it from none.
    """
    module = f"mlx_vlm.speculative.drafters.{THEIRS[name]}"
    theirs_module = pytest.importorskip(module, reason="mlx-vlm is not installed")
    form, network = FORMS[name], network_of(target)
    if name == "DFlash 2":
        form = replace(form, config={**form.config, "sliding_window": 64})
    head = head_of(network, target, tmp_path / "head", form)
    theirs = theirs_module.Model(theirs_module.ModelConfig.from_dict({"dflash_config": {}, **form.config}))
    theirs.load_weights(list(theirs.sanitize(weights(form)).items()), strict=False)
    if "embed_tokens" in form.has:
        theirs.embed_tokens.weight = weights(form)["embed_tokens.weight"]
    own_head = weights(form).get("lm_head.weight")
    theirs.embed_tokens = theirs.embed_tokens or network.model.embed_tokens
    theirs.lm_head = network.model.embed_tokens.as_linear if own_head is None else lambda x: x @ own_head.T
    caches = theirs.make_cache()
    session, num_read = Session(head), 0
    for text, n in (([5, 9, 100, 7, 8000], 3), ([3, 44, 2], form.most), ([1, 2, 3, 4, 6, 8, 7], 2)):
        session.feed(text)
        rows: list[mx.array] = []

        def choose(logits: mx.array, rows: list[mx.array] = rows) -> mx.array:
            rows.append(logits.reshape(-1, logits.shape[-1]))
            return mx.argmax(logits, axis=-1)

        choose.sample_proposal = choose  # type: ignore[attr-defined]
        states = mx.array(states_of(network, form, session.text))[None, num_read:]
        num_read = len(session.text)
        drafted = theirs.draft_block(77, states, caches, n + 1, choose)
        expected = np.array(mx.concatenate(rows))
        found = [finish(session.context.first_logits(session.layers, *session.unread(77), n))]
        found += [finish(session.context.next_logits(drafted[0, i : i + 1])) for i in range(n - 1)]
        own = np.array(mx.concatenate(found))
        assert own.argmax(-1).tolist() == drafted[0].tolist()
        if "selector" in form.has:  # they say the logits of candidates alone
            own, expected = (np.sort(each)[:, -form.top_k :] for each in (own, expected))
        np.testing.assert_allclose(own, expected, atol=1e-4)


@pytest.mark.parametrize("name", ["z-lab's DFlash with a window", "DFlash 2", "speculators' DSpark"])
def test_contexts_after_any_rewinds_copies_and_failures_are_those_of_the_tokens(
    name: str, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows drop old rows, and begin again after a rewind to a position that they have dropped.

    A pass that fails in the last layer leaves nothing in the others.
    """
    for place, value in {
        "specd.worker.layers.rows.SLACK": 8,
        "specd.worker.heads.recent_states.KEPT": 16,
        "specd.worker.layers.full.FullCache.step": 4,
    }.items():
        monkeypatch.setattr(place, value)
    head = head_of(network_of(target), target, tmp_path / "head", FORMS[name])
    random, num_begun_again = Random(name), 0
    sessions = [Session(head)]
    for _ in range(60):
        session = random.choice(sessions)
        session.feed([random.randrange(ROWS) for _ in range(random.randint(1, 9))])
        if random.random() < 0.7:
            next_token, n = random.randrange(ROWS), random.randint(1, head.most_draft_tokens)
            if random.random() < 0.2:
                last: Any = head.layers[-1]
                mlp, last.mlp = last.mlp, lambda _: 1 / 0
                with pytest.raises(ZeroDivisionError):
                    session.draft(next_token, n)
                last.mlp = mlp
            drafted, rows = session.draft(next_token, n)
            assert session.context.end == len(session.text)
            begin = session.context.begin
            num_begun_again += begin > 0
            fresh = Session(head)
            fresh.feed(session.text)
            fresh.context._recent._rows = fresh.context._recent.between(begin, len(session.text))
            again, expected = fresh.draft(next_token, n)
            assert again == drafted
            np.testing.assert_allclose(rows, expected, atol=1e-3)
        if random.random() < 0.4:
            session.rewind(max(len(session.text) - random.choice([1, 3, 6, 40]), 1))
        elif random.random() < 0.2:
            position = random.randint(max(len(session.text) - 6, 1), len(session.text))
            other = Session(head)
            other.layers, other.context = session.layers.copy(position), session.context.copy(position)
            other.text = session.text[:position]
            sessions = [*sessions[-2:], other]
    assert num_begun_again > 3


def test_the_memory_of_a_context_is_what_it_takes(target: Path, tmp_path: Path) -> None:
    for name in ("z-lab's DFlash", "DFlash 2"):
        head = head_of(network_of(target), target, tmp_path / name, FORMS[name])
        session = Session(head)
        for _ in range(6):
            session.feed([7] * 100)
            session.draft(3, 2)
        held = sum(array.nbytes for array in session.context.arrays)
        stated = head.measured_footprint().bytes_for(len(session.text))
        assert 0.8 * held < stated < 1.4 * held


def with_head(target: Path, tmp_path: Path, form: Form) -> LoadedModel:
    model = load(
        str(target), blas="", is_optimized=True, head=save_repository(tmp_path / "head", form.config, weights(form))
    )
    assert model.head is not None
    assert model.head.batches
    assert isinstance(model.head.network, DFlashHead)
    return model


@pytest.mark.parametrize("name", examples(FORMS, 3))
async def test_texts_are_those_of_the_target_alone(name: str, target: Path, tmp_path: Path) -> None:
    """Also with more draft tokens asked for than a block has."""
    form = FORMS[name]
    model = with_head(target, tmp_path, form)
    assert model.head is not None
    for temperature in (0.0, 1.0):
        sampling, prompts = Sampling(temperature=temperature, seed=2), prompts_of(2, 4)
        async with serving(None, model) as service:
            expected, _ = await decode_all(service, sampling, prompts, (0,), seed=2, is_erratic=False)
        async with serving(HeadDraft(model.head.info, COSTS), model) as service:
            for is_erratic in (True, False):
                said, callers = await decode_all(service, sampling, prompts, (0, 1, 12), seed=2, is_erratic=is_erratic)
                assert said == expected
                assert {fault for each in callers for fault in each.faults} <= {""}
        assert max(len(proposal) for each in callers for _, proposal in each.proposals) == form.most


async def test_texts_of_a_target_with_recurrent_states_are_its_own(tmp_path: Path) -> None:
    save_family(tmp_path / "hybrid", "qwen3_5")
    model = with_head(tmp_path / "hybrid", tmp_path, FORMS["DFlash 2"])
    assert model.head is not None
    sampling, prompts = Sampling(temperature=1.0, seed=3), prompts_of(3, 3)
    async with serving(None, model) as service:
        expected, _ = await decode_all(service, sampling, prompts, (0,), seed=3, is_erratic=False)
    async with serving(HeadDraft(model.head.info, COSTS), model) as service:
        said, callers = await decode_all(service, sampling, prompts, (0, 3, 7), seed=3, is_erratic=True)
    assert said == expected
    assert {fault for each in callers for fault in each.faults} == {""}


@pytest.mark.parametrize("name", ["DFlash 2", "SpecForge's DSpark"])
async def test_a_replay_proposes_what_the_undisturbed_session_proposes(name: str, target: Path, tmp_path: Path) -> None:
    """A worker that has begun again gets all tokens at once, and reads their states in other chunks."""
    model = with_head(target, tmp_path, FORMS[name])
    assert model.head is not None
    sampling = Sampling(temperature=1.0, seed=1)
    async with serving(HeadDraft(model.head.info, COSTS), model) as service:
        _, (caller,) = await decode_all(service, sampling, prompts_of(1, 1), (4,), seed=1, is_erratic=True)
    assert len(caller.proposals) > 10
    for length, proposal in caller.proposals[::3]:
        async with serving(HeadDraft(model.head.info, COSTS), model) as service:
            replayed = Caller(service, sampling, Random(0), caller.tokens[: length - 1])
            await replayed.decode(1, ks=(4,), is_erratic=False)
        assert replayed.tokens == caller.tokens[:length]
        ((at, again),) = replayed.proposals
        assert at == length
        assert again[: len(proposal)] == proposal  # an erratic caller can let a proposal end early


@pytest.mark.parametrize("name", ["z-lab's DFlash", "DFlash 2", "speculators' DSpark"])
def test_rejection_gets_the_distributions_of_a_block(name: str, target: Path, tmp_path: Path) -> None:
    form, network = FORMS[name], network_of(target)
    session = Session(head_of(network, target, tmp_path / "head", form))
    session.feed([5, 9, 100, 7, 8000])
    sampler = Sampler(Sampling(temperature=1.0, seed=4, acceptance=Acceptance.REJECTION), ROWS)

    def feed(latest: mx.array | None) -> Any:
        if latest is not None:
            return session.context.next_logits(latest)
        return session.context.first_logits(session.layers, *session.unread(3), form.most)

    drafted: DraftedTokens = finish(draft_tokens(feed, sampler, 6, None, form.most, ()))
    reference = Reference(form, weights(form), np.array(network.model.embed_tokens.weight))
    rows = reference.rows(states_of(network, form, session.text), 3, drafted.token_ids)
    for token, distribution, row in zip(drafted.token_ids, drafted.distributions, rows, strict=True):
        expected = np.exp(row - row.max())
        expected /= expected.sum()
        assert expected[token] > 0
        np.testing.assert_allclose(decode_distributions([distribution], ROWS)[0], expected, atol=1e-5)


@pytest.mark.parametrize("name", ["DFlash 2", "speculators' DSpark"])
async def test_rejection_emits_a_text_of_whole_length(name: str, target: Path, tmp_path: Path) -> None:
    model = with_head(target, tmp_path, FORMS[name])
    assert model.head is not None
    sampling = Sampling(temperature=1.0, seed=1, acceptance=Acceptance.REJECTION)
    async with serving(HeadDraft(model.head.info, COSTS), model) as service:
        texts, callers = await decode_all(service, sampling, prompts_of(1, 3), (3,), seed=1, is_erratic=False)
    assert {len(text) for text in texts} == {40}
    assert {fault for each in callers for fault in each.faults} == {""}


def test_a_trial_proposes_no_more_than_a_block_has(target: Path, tmp_path: Path) -> None:
    model = with_head(target, tmp_path, FORMS["SpecForge's DSpark"])
    assert model.head is not None
    head: Any = model.head.network
    trials = [HeadTrial(head, 9) for _ in range(2)]
    for trial in trials:
        finish(trial.read())
    for n, expected in ((8, 4), (3, 3)):
        for trial in trials:
            trial.rewind()
        assert head_trial.propose(trials, n).size == 2 * expected
    assert isinstance(trials[0]._cache, Context)


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: each for name, each in tensors.items() if name not in names}


def same(tensors: Tensors) -> Tensors:
    return tensors


FAULTS: dict[str, tuple[str, Mapping[str, Any], Callable[[Tensors], Tensors], str]] = {
    "missing": ("z-lab's DFlash", {}, without("fc.weight"), "it lacks fc.weight"),
    "another family's": ("z-lab's DFlash", {"hidden_activation": "gelu_pytorch_tanh"}, same, "silu is supported"),
    "unknown": ("z-lab's DFlash", {}, lambda w: w | {"gates": mx.zeros(3)}, "it also has gates"),
    "a shape": (
        "DFlash 2", {}, lambda w: w | {"fc.weight": mx.zeros((32, 64))}, r"fc.weight \[32, 64\] instead of \[32, 96\]",
    ),
    "a GRU": ("SpecForge's DSpark", {"projector_type": "domino"}, same, "its projector_type is domino"),
    "a gated Markov head": ("DeepSpec's DSpark", {"markov_head_type": "gated"}, same, "its markov_head_type is gated"),
    "no such layer": ("DeepSpec's DSpark", {"target_layer_ids": [1, 7]}, same, "4 layers, and none with the number 8"),
    "no block": ("DeepSpec's DSpark", {"block_size": None}, same, "probably because of its config.json"),
    "an empty block": ("z-lab's DFlash", {"block_size": 1}, same, "blocks have 1 tokens, and none is drafted"),
    "no window": ("DFlash 2", {"sliding_window": None}, same, "sliding_window is missing"),
    "a small window": ("DFlash 2", {"sliding_window": 4}, same, "smaller than its blocks of 8"),
    "layer types": ("DFlash 2", {"layer_types": ["sliding_attention"]}, same, "it has 2 layers, and its layer_types"),
    "groups": ("DFlash 2", {"conv_group_size": 7}, same, "conv_group_size 7 does not divide hidden_size 32"),
    "two chains": ("DFlash 2", {"markov_rank": 8}, same, "a Markov head and a candidate selector"),
    "the mask": ("z-lab's DFlash", {"mask_token_id": ROWS}, same, "mask_token_id 8192 has no embedding"),
    "the target's size": ("z-lab's DFlash", {"hidden_size": 2 * SIZE}, same, "64 numbers, and those of the target 32"),
    "a smaller vocabulary": ("z-lab's DFlash", {"vocab_size": 300}, same, "drafts 300 of 300 tokens; the target has"),
    "no map": ("speculators' DSpark", {}, without("d2t"), "lm_head or d2t is missing"),
    "no output layer": ("speculators' DSpark", {}, without("lm_head.weight"), "lm_head or d2t is missing"),
    "another type": ("DFlash 2", {"hidden_size": "32"}, same, "probably because of its config.json"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_head_that_does_not_fit_is_refused_with_the_reason(fault: str, target: Path, tmp_path: Path) -> None:
    name, changes, change, reason = FAULTS[fault]
    config = {**FORMS[name].config, **changes}
    inner = config.get("dflash_config") or {}
    config["dflash_config"] = {**inner, **{key: each for key, each in changes.items() if key in inner}}
    save_repository(tmp_path / "head", config, change(weights(FORMS[name])))
    with pytest.raises(StartupError, match=reason):
        load_head(network_of(target), target, batches=False, name=str(tmp_path / "head"))
