"""Measurements of a target and its possible drafts, along texts of the target's own, one model in memory at a time."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx

from specd.errors import SpecdError
from specd.model_info import ModelInfo, pair_conflict
from specd.pair_worth import MOST_DRAFT_TOKENS, DraftTrial, TargetTrial, TrialRounds, rounds_along, sums_of
from specd.sampling import Sampling
from specd.startup_error import StartupError
from specd.text.tokenizer import Tokenizer
from specd.vocabulary import OWN_HEAD
from specd.worker.cpu.scheduling_policy import schedule_in_batches
from specd.worker.cpu.streams import use_threads
from specd.worker.engine.forward import compute
from specd.worker.engine.jobs import Encode, Evaluate, Feed, Result, Steps
from specd.worker.engine.prefill_chunk import PrefillChunk
from specd.worker.model.calibration import Workload, measure_curves
from specd.worker.model.loader import LoadedModel, load
from specd.worker.session.head_draft import SessionHead
from specd.worker.session.self_draft import SessionDrafter
from specd.worker.session.session_cache import SessionCache

# Beginnings of different kinds of text. The target continues them, so most of each text is the target's own.
_PROMPTS = (
    'def parse_date(text):\n    """Parse a date such as 2024-03-01."""\n',
    "The history of the city begins with a small harbour.",
    "class Stack:\n    def __init__(self):\n        self.items = []\n",
    "Question: Why is the sky blue?\nAnswer:",
    "import json\n\n\ndef load_settings(path):\n",
    "1. Wash the vegetables.\n2.",
)
_TEXT_TOKENS = 48
_ENOUGH_TOKENS = 192
_TEXT_SECONDS = 6.0
# The target's passes have k + 1 tokens.
_VERIFIES = Workload((1, 5, 9, 3, 2, 4, 7, 6, 8))
_PROPOSALS = Workload((1, 4, 8, 2), proposes=True)
_TARGET_SECONDS = 3.0
_DRAFT_SECONDS, _ALL_DRAFTS_SECONDS = 1.5, 8.0
_HEAD_TOKENS = (1, 2, 4, 8)
_GREEDY = Sampling()


@dataclass(frozen=True)
class TargetText:
    """A text: its first `start` tokens are given, and the target has chosen the others. `source` is for an encoder."""

    tokens: Sequence[int]
    start: int
    source: Sequence[int] = ()


def measure_pairs(request: Mapping[str, Any], blas: str) -> Iterator[dict[str, Any]]:
    """Measure the models of a request, and yield what is known of each, as values of JSON.

    The request has the directory of the `target`, and what to measure: the `drafts`, a directory by key, and the
    `heads`, of which OWN_HEAD is in the target's own files; also the numbers of `threads` of both workers. If it has
    the `known` texts and times of the target from an earlier trial, the target is loaded only for its heads.
    """
    if mx.default_device().type == mx.cpu:
        schedule_in_batches()
    heads, drafts, known = dict(request["heads"]), request["drafts"], request.get("known")
    wants_own = heads.pop(OWN_HEAD, None) is not None
    use_threads(request["threads"]["target"])
    if known is None or wants_own:
        target = load(request["target"], blas=blas, is_optimized=True, head=OWN_HEAD if wants_own else "")
        if known is None:
            known = _measured_target(target)
        yield {"target": known}
        if wants_own:
            texts = [TargetText(**text) for text in known["texts"]]
            yield {"draft": OWN_HEAD, "trial": _measured_head(target, texts).as_record()}
        del target
    info = ModelInfo(**known["model"])
    texts = [TargetText(**text) for text in known["texts"]]
    for key, directory in heads.items():
        _free()
        try:
            trial = _measured_head(load(request["target"], blas=blas, is_optimized=True, head=directory), texts)
        except (StartupError, SpecdError, RuntimeError) as error:
            trial = DraftTrial(failure=str(error))
        yield {"draft": key, "trial": trial.as_record()}
    use_threads(request["threads"]["draft"])
    seconds = min(_DRAFT_SECONDS, _ALL_DRAFTS_SECONDS / max(len(drafts), 1))
    for key, directory in drafts.items():
        _free()
        try:
            trial = _measured_draft(load(directory, blas=blas, is_optimized=True), info, texts, seconds)
        except (StartupError, SpecdError, RuntimeError) as error:  # its worker would fail too
            trial = DraftTrial(failure=str(error))
        yield {"draft": key, "trial": trial.as_record()}


def _free() -> None:
    """Free the memory of the previous model, which only reference cycles still hold."""
    gc.collect()
    mx.clear_cache()


def _measured_target(target: LoadedModel) -> dict[str, Any]:
    texts = texts_of(target)
    costs = run(measure_curves(target, _VERIFIES, _TARGET_SECONDS, several=(1,)))
    trial = TargetTrial(costs.measured[1], target.info.device)
    return {**asdict(trial), "texts": [asdict(text) for text in texts], "model": asdict(target.info)}


def _measured_draft(draft: LoadedModel, target: ModelInfo, texts: Sequence[TargetText], seconds: float) -> DraftTrial:
    if conflict := pair_conflict(target, draft.info):
        return DraftTrial(failure=conflict)
    rounds = [_rounds(run(agreements_of(draft, target, text))) for text in texts if _fits(draft, text)]
    costs = run(measure_curves(draft, _PROPOSALS, seconds, several=(1,)))
    return DraftTrial(sums_of(rounds), costs.measured[1])


def _measured_head(target: LoadedModel, texts: Sequence[TargetText]) -> DraftTrial:
    if target.head is None:
        return DraftTrial(failure="its files have no head that specd can read")
    costs = run(measure_curves(target.head, _PROPOSALS, _DRAFT_SECONDS, several=(1,)))
    size = target.info.vocabulary_size
    rounds = [
        {k: run(decoded_rounds(target, SessionHead(_GREEDY, size), text, k)) for k in _HEAD_TOKENS} for text in texts
    ]
    return DraftTrial(sums_of(rounds), costs.measured[1])


def texts_of(target: LoadedModel) -> list[TargetText]:
    """Return greedy continuations of the prompts, which end early where the target does."""
    tokenizer = Tokenizer(target.tokenizer_json)
    started_at = time.perf_counter()
    texts: list[TargetText] = []
    most = target.info.context_length
    for prompt in _PROMPTS:
        ids = [each for each in tokenizer.encode(prompt) if each < target.info.vocabulary_size][: max(most // 2, 1)]
        start = target.info.decoder_start_token_id
        text = TargetText(ids, len(ids)) if start is None else TargetText([start], 1, ids)
        num_tokens = min(_TEXT_TOKENS, most - text.start)
        texts.append(run(_continued(target, text, num_tokens)))
        written = sum(len(each.tokens) - each.start for each in texts)
        if written >= _ENOUGH_TOKENS or time.perf_counter() - started_at > _TEXT_SECONDS:
            break
    return texts


def _continued(target: LoadedModel, text: TargetText, num_tokens: int) -> Steps[TargetText]:
    cache, tokens = _session(target, text), list(text.tokens)
    latest = yield from cache.prefill(0, tokens, PrefillChunk(1.0))
    while len(tokens) < text.start + num_tokens:
        (chosen,) = yield from _choices(cache, latest, 1)
        latest = [chosen]
        tokens += latest
        if chosen in target.info.eos_token_ids:
            break
    cache.free()
    return TargetText(tokens, text.start, text.source)


def agreements_of(draft: LoadedModel, target: ModelInfo, text: TargetText) -> Steps[list[bool]]:
    """Return for each token of the target but the first whether the draft chooses it too, after the text before it.

    The first comes with the prefill of the prompt, before there is a proposal.
    """
    cache, tokens = _session(draft, text), list(text.tokens)
    size = min(target.vocabulary_size, draft.info.vocabulary_size)  # as a draft worker does
    chosen: list[int] = []

    def read(logits: mx.array, _: Sequence[int]) -> Steps[None]:
        choices = mx.argmax(logits[:, :size], axis=-1)
        yield Evaluate([choices])
        chosen.extend(choices.tolist())  # type: ignore[arg-type]

    pending = yield from cache.prefill(0, tokens, PrefillChunk(1.0), read)
    yield from read((yield from cache.feed(mx.array(pending))), ())
    cache.free()
    # The choice at place i is for token i + 1.
    return [chosen[i - 1] == tokens[i] for i in range(text.start + 1, len(tokens))]


def _rounds(agreements: Sequence[bool]) -> dict[int, TrialRounds]:
    return {k: rounds_along(agreements, k) for k in range(1, MOST_DRAFT_TOKENS + 1)}


def decoded_rounds(target: LoadedModel, drafter: SessionDrafter, text: TargetText, k: int) -> Steps[TrialRounds]:
    """Return the greedy rounds in which the target verifies proposals of k tokens, along one of its texts.

    A head needs them, because it reads the target's hidden states. `rounds_along` has the same rounds for a model.
    """
    cache = _session(target, text)
    emitted, proposal, total = list(text.tokens[: text.start]), list[int](), TrialRounds()
    latest = yield from cache.prefill(0, emitted, PrefillChunk(1.0))
    while len(emitted) + k < len(text.tokens):
        own = yield from _choices(cache, [*latest, *proposal], len(proposal) + 1)
        accepted = next((i for i, each in enumerate(proposal) if own[i] != each), len(proposal))
        if proposal:
            total += TrialRounds(1, accepted, accepted < len(proposal))
        cache.known_len += accepted
        emitted += [*proposal[:accepted], own[accepted]]
        drafted = yield from drafter.propose(cache, own[accepted], k, ())
        proposal = list(drafted.token_ids)
        latest = yield from cache.prefill(len(emitted) - 1, [own[accepted]], PrefillChunk(1.0))
    cache.free()
    return total


def _choices(cache: SessionCache, token_ids: Sequence[int], count: int) -> Steps[list[int]]:
    """Feed tokens, and return the model's own choices after the last `count` of them."""
    logits = yield from cache.feed(mx.array([*token_ids]))
    choices = mx.argmax(logits[-count:], axis=-1)
    yield Evaluate([choices, *(cache.head_cache.arrays if cache.head_cache is not None else [])])
    cache.commit(token_ids)
    return choices.tolist()  # type: ignore[return-value]


def _session(model: LoadedModel, text: TargetText) -> SessionCache:
    cache = SessionCache(model)
    cache.source = tuple(text.source)
    return cache


def _fits(draft: LoadedModel, text: TargetText) -> bool:
    return len(text.tokens) <= draft.info.context_length


def run(steps: Steps[Result]) -> Result:
    """Run a job of a worker's engine on this thread."""
    answer: Any = None
    try:
        while True:
            wants = steps.send(answer)
            answer = None
            if isinstance(wants, (Feed, Encode)):
                (answer,) = compute([wants], owns_all_cores=True)
            elif isinstance(wants, Evaluate):
                mx.eval(wants.arrays)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
