"""Step costs are measured once, within their time, kept for the next start, and leave nothing behind."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from subprocess import PIPE
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from specd.sampling import Sampling
from specd.step_costs import StepCosts
from specd.user_cache import taking_turns
from specd.worker.engine.forward import BareCache
from specd.worker.engine.jobs import Evaluate
from specd.worker.layers.session_layers import SessionLayers
from specd.worker.model import calibration
from specd.worker.model.calibration import PROPOSALS, VERIFIES, Calibration, Workload, calibrate, keep
from specd.worker.model.loader import LoadedModel
from specd.worker.sampling.sampler import Sampler
from specd.worker.session.proposal import propose
from specd.worker.session.session_cache import SessionCache
from tests.worker.driving import Chunks, finish
from tests.worker.models import TINY_VOCABULARY_SIZE, tiny_model

MODEL = tiny_model()
SMALL = Workload((1, 2))


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "specd"


class FakeClock:
    """Steps take time in proportion to their tokens, for any load of this machine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.steps: list[tuple[int, int]] = []
        self._feed, self._propose = calibration._feed, calibration._propose
        monkeypatch.setattr(calibration, "_feed", self.feed)
        monkeypatch.setattr(calibration, "_propose", self.propose)
        monkeypatch.setattr("specd.worker.model.calibration.time.perf_counter", lambda: self.now)

    def feed(self, caches: Sequence[BareCache], width: int) -> mx.array:
        self.steps.append((len(caches), width))
        self.now += step_seconds(len(caches), width)
        return self._feed(caches, width)

    def propose(self, caches: Sequence[BareCache], num_draft_tokens: int) -> mx.array:
        self.steps.append((len(caches), num_draft_tokens))
        self.now += proposal_seconds(len(caches), num_draft_tokens)
        return self._propose(caches, num_draft_tokens)


def proposal_seconds(sessions: int, num_draft_tokens: int) -> float:
    return step_seconds(sessions, 2) + (num_draft_tokens - 1) * step_seconds(sessions, 1)


def step_seconds(sessions: int, width: int) -> float:
    return 0.010 + 0.001 * sessions * width


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    return FakeClock(monkeypatch)


def calibrated(model: LoadedModel = MODEL, workload: Workload = SMALL, seconds: float = 60.0) -> StepCosts:
    return finish(calibrate(model, workload, seconds)).costs


def files(kept: Path) -> list[Path]:
    """Return what is kept, without the lock."""
    return [path for path in kept.iterdir() if path.name != "calibration.lock"]


def other_model() -> LoadedModel:
    return replace(MODEL, info=replace(MODEL.info, fingerprint="other"))


def fail_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(caches: Sequence[BareCache], width: int) -> mx.array:
        raise AssertionError("measured again")

    monkeypatch.setattr(calibration, "_feed", fail)
    monkeypatch.setattr(calibration, "_propose", fail)


# What is measured.


@pytest.mark.parametrize("workload", [PROPOSALS, Workload((1, 8, 33))])
def test_all_sizes_are_measured_for_one_session_and_some_for_more(workload: Workload) -> None:
    measured = calibrated(workload=workload).measured
    assert [*measured] == [1, 2, 4, 16]
    assert [*measured[1]] == sorted(workload.sizes)
    for sessions in (4, 16):
        assert [*measured[sessions]] == sorted({*workload.sizes} & {1, 2, 4, 8})
    assert all(seconds > 0 for curve in measured.values() for seconds in curve.values())


def test_what_is_measured_is_what_the_steps_took(clock: FakeClock) -> None:
    measured = calibrated(workload=VERIFIES).measured
    for sessions, curve in measured.items():
        for width, seconds in curve.items():
            assert seconds == pytest.approx(step_seconds(sessions, width))
    assert sorted(measured[1]) == sorted(VERIFIES.sizes)


def test_the_draft_measures_whole_proposals(clock: FakeClock) -> None:
    measured = calibrated(workload=PROPOSALS).measured
    assert {sessions: [*curve] for sessions, curve in measured.items()} == {n: [1, 2, 4, 8] for n in (1, 2, 4, 16)}
    for sessions, curve in measured.items():
        for num_draft_tokens, seconds in curve.items():
            assert seconds == pytest.approx(proposal_seconds(sessions, num_draft_tokens))
    # The fixed cost of a step, which two sessions that share it save.
    assert StepCosts(measured).fixed_seconds == pytest.approx(0.010)


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 8])
def test_a_measured_proposal_is_one_of_the_draft_worker(num_draft_tokens: int) -> None:
    """Two tokens, then those that the draft chooses, one by one."""
    caches = [BareCache(MODEL.network, SessionLayers(MODEL.network), True) for _ in range(3)]
    chosen = calibration._propose(caches, num_draft_tokens)
    assert [cache.layers.num_fed for cache in caches] == 3 * [PROPOSALS.num_fed(num_draft_tokens)]
    cache, sampler = SessionCache(MODEL), Sampler(Sampling(), TINY_VOCABULARY_SIZE)
    proposal = finish(propose(cache, sampler, 0, [0, 0], num_draft_tokens, chunk=Chunks(64)))
    assert chosen.reshape(-1, 3).T.tolist() == 3 * [proposal.token_ids]


def test_the_first_and_slow_pass_of_a_shape_and_a_single_slow_one_do_not_count(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = clock.feed

    def slow(caches: Sequence[BareCache], width: int) -> mx.array:
        if clock.steps.count((len(caches), width)) in (0, 2):
            clock.now += 1.0
        return feed(caches, width)

    monkeypatch.setattr(calibration, "_feed", slow)
    measured = calibrated(workload=VERIFIES).measured
    assert measured[1][2] == pytest.approx(step_seconds(1, 2))


def test_every_width_is_measured_on_caches_of_the_same_length(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: dict[int, set[int]] = {}
    feed = calibration._feed

    def look(caches: Sequence[BareCache], width: int) -> mx.array:
        for cache in caches:
            lengths.setdefault(width, set()).add(cache.layers.num_fed)
        return feed(caches, width)

    monkeypatch.setattr(calibration, "_feed", look)
    calibrated(workload=Workload((1, 4)))
    assert lengths == {128: {0}, 1: {128}, 4: {128}}


def test_a_model_that_takes_sessions_in_turns_is_measured_for_one() -> None:
    assert [*calibrated(replace(MODEL, batches=False)).measured] == [1]


@pytest.mark.parametrize("context_length", [2, 3, 16, 40])
@pytest.mark.parametrize("workload", [VERIFIES, PROPOSALS])
def test_nothing_goes_beyond_the_context(context_length: int, workload: Workload, clock: FakeClock) -> None:
    small = replace(MODEL, info=replace(MODEL.info, context_length=context_length))
    measured = calibrated(small, workload).measured
    assert 1 in measured[1]
    cached_len = context_length // 2 if context_length > 2 or workload is VERIFIES else 0
    assert workload.num_fed(max(measured[1])) + cached_len <= context_length


# How long it takes.


@pytest.mark.parametrize("seconds", [0.0, 1e-9])
def test_without_time_it_measures_two_widths(seconds: float, clock: FakeClock) -> None:
    measured = calibrated(workload=VERIFIES, seconds=seconds).measured
    assert measured == {1: {width: pytest.approx(step_seconds(1, width)) for width in sorted(VERIFIES.sizes[:2])}}


@pytest.mark.parametrize("seconds", [0.1, 0.3, 0.7])
def test_it_stops_when_its_time_is_over_with_the_most_telling_widths(seconds: float, clock: FakeClock) -> None:
    started_at = clock.now
    measured = calibrated(workload=VERIFIES, seconds=seconds).measured
    took = clock.now - started_at
    assert sorted(measured[1]) == sorted(VERIFIES.sizes[: len(measured[1])])
    assert 2 <= len(measured[1]) < len(VERIFIES.sizes)
    for curve in measured.values():
        assert len(curve) >= 2
    most = 16 * step_seconds(16, 128) + 4 * (step_seconds(16, 1) + step_seconds(16, 8))
    assert seconds < took < 2 * seconds + most


def test_the_time_is_shared_among_numbers_of_sessions(clock: FakeClock) -> None:
    measured = calibrated(workload=VERIFIES, seconds=1.0).measured
    assert [*measured] == [1, 2, 4, 16]


# What is kept.


def test_a_second_start_takes_what_the_first_has_kept(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = calibrated()
    assert len(files(kept)) == 1
    fail_to_measure(monkeypatch)
    assert calibrated().measured == first.measured


def test_what_was_learnt_since_is_kept_too(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = calibrated()
    for _ in range(50):
        costs.observe(1, 2, 1.0)
    keep(MODEL, SMALL, Calibration(costs))
    assert len(files(kept)) == 1
    fail_to_measure(monkeypatch)
    assert calibrated().measured == costs.measured


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", "null", "\udcff", '{"seconds": {"1": {"1": 1.0}}}'] + [
        f'{{"seconds": {seconds}, "logit_rounding": {rounding}}}'
        for seconds, rounding in [
            *((each, 0.0) for each in ('{"1": {}}', '{"1": {"1": 0}}', '{"1": {"1": -1.0}}', '{"1": {"1": "soon"}}',
              '{"1": [1.0]}', '{"one": {"1": 1.0}}', '{"1": {"1": NaN}}', '{"1": {"1": Infinity}}')),
            *(('{"1": {"1": 1.0}}', each) for each in ("NaN", "Infinity", "-1e-6", "null", '"small"')),
        ]
    ],
)  # fmt: skip
def test_a_damaged_file_is_measured_again_and_replaced(content: str, kept: Path, clock: FakeClock) -> None:
    calibrated()
    (path,) = files(kept)
    path.write_bytes(content.encode(errors="surrogateescape"))
    clock.steps.clear()
    measured = calibrated().measured
    assert clock.steps
    assert measured[1][1] == pytest.approx(step_seconds(1, 1))
    clock.steps.clear()
    assert calibrated().measured == measured
    assert not clock.steps


@pytest.mark.parametrize("field", ["fingerprint", "device", "precision"])
def test_another_model_or_device_has_a_file_of_its_own(field: str, kept: Path, clock: FakeClock) -> None:
    calibrated()
    other = replace(MODEL, info=replace(MODEL.info, **cast(Any, {field: "other"})))
    clock.steps.clear()
    calibrated(other)
    assert clock.steps
    assert len(files(kept)) == 2


@pytest.mark.parametrize("library", ["mlx", "mlx-lm"])
def test_other_libraries_have_a_file_of_their_own(
    library: str, kept: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrated()
    monkeypatch.setattr(
        "specd.worker.model.calibration.version", lambda name: "99" if name == library else version(name)
    )
    calibrated()
    assert len(files(kept)) == 2


def test_a_cache_that_cannot_be_made_is_done_without(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for _ in range(2):
        clock.steps.clear()
        assert calibrated().measured[1][1] == pytest.approx(step_seconds(1, 1))
        assert clock.steps


def test_a_cache_that_cannot_be_written_is_done_without(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write with any mode
    costs = calibrated()
    keep(MODEL, SMALL, Calibration(costs))
    assert files(kept) == []


def test_a_full_disk_is_no_reason_not_to_start(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert calibrated().measured[1]
    keep(MODEL, SMALL, Calibration(StepCosts({1: {1: 1.0}})))
    assert files(kept) == []


def test_a_draft_that_becomes_a_target_is_measured_as_one(kept: Path) -> None:
    assert [*calibrated(workload=PROPOSALS).measured[1]] == sorted(PROPOSALS.sizes)
    assert [*calibrated(workload=VERIFIES).measured[1]] == sorted(VERIFIES.sizes)
    assert len(files(kept)) == 2


# Workers that start together.


def test_workers_measure_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = []

    @contextmanager
    def turn(what: str, *, timeout_seconds: float) -> Iterator[bool]:
        turns.append((what, timeout_seconds))
        yield True
        turns.append((what, 0.0))

    monkeypatch.setattr(calibration, "taking_turns", turn)
    calibrated(seconds=3.0)
    assert turns == [("calibration", 6.0), ("calibration", 0.0)]
    calibrated(seconds=3.0)
    assert len(turns) == 2, "what is known needs no turn"


def test_a_turn_ends_with_its_process_and_is_not_waited_for_without_end(kept: Path) -> None:
    program = """if True:
        from specd.user_cache import taking_turns
        with taking_turns("x", timeout_seconds=30.0) as has_turn:
            print(has_turn, flush=True)
            input()
    """
    with subprocess.Popen([sys.executable, "-c", program], stdin=PIPE, stdout=PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "True\n"
        with taking_turns("x", timeout_seconds=0.05) as has_turn, taking_turns("y", timeout_seconds=0.0) as has_another:
            assert not has_turn
            assert has_another
        other.kill()
        with taking_turns("x", timeout_seconds=30.0) as has_turn:
            assert has_turn
    with taking_turns("x", timeout_seconds=0.0) as has_turn:
        assert has_turn


def test_a_lock_that_cannot_be_had_is_no_reason_not_to_start(kept: Path) -> None:
    (kept / "calibration.lock").mkdir(parents=True)
    assert calibrated(seconds=0.01).measured[1]


def test_without_a_cache_there_are_no_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    with taking_turns("x", timeout_seconds=30.0) as has_turn:
        assert not has_turn


# What is left behind.


def test_nothing_is_left_of_the_caches() -> None:
    calibrated(workload=Workload((1, 2)))  # the first pass leaves some memory for ever
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    num_caches = count_caches()
    costs = calibrated(other_model(), Workload((1, 8)))
    gc.collect()
    assert count_caches() == num_caches
    assert mx.get_active_memory() <= before
    assert costs.measured


def test_a_calibration_that_is_dropped_leaves_nothing_and_keeps_nothing(kept: Path) -> None:
    steps = calibrate(MODEL, VERIFIES, 60.0)
    for _ in range(5):
        wants = next(steps)
        assert isinstance(wants, Evaluate)
        mx.eval(wants.arrays)
    steps.close()
    gc.collect()
    assert count_caches() == 0
    assert not files(kept)


def count_caches() -> int:
    return sum(type(thing) is KVCache and thing.keys is not None for thing in gc.get_objects())
