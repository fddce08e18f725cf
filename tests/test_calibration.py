"""What steps cost is measured once, within its time, kept for the next start, and leaves nothing behind."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from specd.step_costs import StepCosts
from specd.worker import calibration
from specd.worker.batch import Evaluate
from specd.worker.calibration import DRAFT_WIDTHS, VERIFY_WIDTHS, calibrate, keep
from specd.worker.model import LoadedModel
from specd.worker.user_cache import taking_turns
from tests.driving import finish
from tests.models import tiny_model

MODEL = tiny_model()


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the user's cache is."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "specd"


class FakeClock:
    """Steps take as long as their tokens say, whatever this machine is doing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.steps: list[tuple[int, int]] = []
        self._feed = calibration._feed
        monkeypatch.setattr(calibration, "_feed", self.feed)
        monkeypatch.setattr(calibration.time, "perf_counter", lambda: self.now)

    def feed(self, caches: Sequence[calibration.BareCache], width: int) -> mx.array:
        self.steps.append((len(caches), width))
        self.now += step_seconds(len(caches), width)
        return self._feed(caches, width)


def step_seconds(sessions: int, width: int) -> float:
    return 0.010 + 0.001 * sessions * width


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    return FakeClock(monkeypatch)


def calibrated(model: LoadedModel = MODEL, widths: Sequence[int] = DRAFT_WIDTHS, seconds: float = 60.0) -> StepCosts:
    return finish(calibrate(model, widths, seconds))


def files(kept: Path) -> list[Path]:
    """Return what is kept, without the lock."""
    return [path for path in kept.iterdir() if path.name != "calibration.lock"]


def other_model() -> LoadedModel:
    return replace(MODEL, info=replace(MODEL.info, fingerprint="other"))


def fail_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(caches: Sequence[calibration.BareCache], width: int) -> mx.array:
        raise AssertionError("measured again")

    monkeypatch.setattr(calibration, "_feed", fail)


# What is measured.


@pytest.mark.parametrize("widths", [DRAFT_WIDTHS, (1, 8, 33)])
def test_all_widths_take_their_time_for_one_session_and_some_for_more(widths: Sequence[int]) -> None:
    measured = calibrated(widths=widths).measured
    assert [*measured] == [1, 2, 4, 16]
    assert [*measured[1]] == sorted(widths)
    for sessions in (4, 16):
        assert [*measured[sessions]] == sorted({*widths} & {1, 2, 4, 8})
    assert all(seconds > 0 for curve in measured.values() for seconds in curve.values())


def test_what_is_measured_is_what_the_steps_took(clock: FakeClock) -> None:
    measured = calibrated(widths=VERIFY_WIDTHS).measured
    for sessions, curve in measured.items():
        for width, seconds in curve.items():
            assert seconds == pytest.approx(step_seconds(sessions, width))
    assert sorted(measured[1]) == sorted(VERIFY_WIDTHS)


def test_the_first_and_slow_pass_of_a_shape_and_a_single_slow_one_do_not_count(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = clock.feed

    def slow(caches: Sequence[calibration.BareCache], width: int) -> mx.array:
        if clock.steps.count((len(caches), width)) in (0, 2):
            clock.now += 1.0
        return feed(caches, width)

    monkeypatch.setattr(calibration, "_feed", slow)
    measured = calibrated().measured
    assert measured[1][2] == pytest.approx(step_seconds(1, 2))


def test_every_width_is_measured_on_caches_of_the_same_length(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: dict[int, set[int]] = {}
    feed = calibration._feed

    def look(caches: Sequence[calibration.BareCache], width: int) -> mx.array:
        for cache in caches:
            lengths.setdefault(width, set()).add(cache.layers[0].offset)
        return feed(caches, width)

    monkeypatch.setattr(calibration, "_feed", look)
    calibrated(widths=(1, 4))
    assert lengths == {128: {0}, 1: {128}, 4: {128}}


def test_a_model_that_takes_sessions_in_turns_is_measured_for_one() -> None:
    assert [*calibrated(replace(MODEL, batches=False)).measured] == [1]


@pytest.mark.parametrize("context_length", [2, 3, 16, 40])
def test_nothing_goes_beyond_the_context(context_length: int, clock: FakeClock) -> None:
    small = replace(MODEL, info=replace(MODEL.info, context_length=context_length))
    measured = calibrated(small, VERIFY_WIDTHS).measured
    assert 1 in measured[1]
    assert max(measured[1]) + context_length // 2 <= context_length


# How long it takes.


@pytest.mark.parametrize("seconds", [0.0, 1e-9])
def test_without_time_it_measures_two_widths(seconds: float, clock: FakeClock) -> None:
    measured = calibrated(widths=VERIFY_WIDTHS, seconds=seconds).measured
    assert measured == {1: {width: pytest.approx(step_seconds(1, width)) for width in sorted(VERIFY_WIDTHS[:2])}}


@pytest.mark.parametrize("seconds", [0.3, 0.7, 1.5])
def test_it_stops_when_its_time_is_over_with_the_most_telling_widths(seconds: float, clock: FakeClock) -> None:
    started_at = clock.now
    measured = calibrated(widths=VERIFY_WIDTHS, seconds=seconds).measured
    took = clock.now - started_at
    assert sorted(measured[1]) == sorted(VERIFY_WIDTHS[: len(measured[1])])
    assert 2 <= len(measured[1]) < len(VERIFY_WIDTHS)
    for curve in measured.values():
        assert len(curve) >= 2
    most = 16 * step_seconds(16, 128) + 4 * (step_seconds(16, 1) + step_seconds(16, 8))
    assert seconds < took < 2 * seconds + most


def test_the_time_is_shared_among_numbers_of_sessions(clock: FakeClock) -> None:
    measured = calibrated(widths=VERIFY_WIDTHS, seconds=1.0).measured
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
    keep(MODEL, DRAFT_WIDTHS, costs)
    assert len(files(kept)) == 1
    fail_to_measure(monkeypatch)
    assert calibrated().measured == costs.measured


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", "null", '{"1": {}}', '{"1": {"1": 0}}', '{"1": {"1": -1.0}}', '{"1": {"1": "soon"}}',
     '{"1": [1.0]}', '{"one": {"1": 1.0}}', '{"1": {"1": NaN}}', '{"1": {"1": Infinity}}', "\udcff"],
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
    other = replace(MODEL, info=replace(MODEL.info, **{field: "other"}))
    clock.steps.clear()
    calibrated(other)
    assert clock.steps
    assert len(files(kept)) == 2


@pytest.mark.parametrize("library", ["mlx", "mlx-lm"])
def test_other_libraries_have_a_file_of_their_own(
    library: str, kept: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrated()
    version = calibration.version
    monkeypatch.setattr(calibration, "version", lambda name: "99" if name == library else version(name))
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
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write whatever the mode is
    costs = calibrated()
    keep(MODEL, DRAFT_WIDTHS, costs)
    assert files(kept) == []


def test_a_full_disk_is_no_reason_not_to_start(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert calibrated().measured[1]
    keep(MODEL, DRAFT_WIDTHS, StepCosts({1: {1: 1.0}}))
    assert files(kept) == []


def test_a_draft_that_becomes_a_target_is_measured_as_one(kept: Path) -> None:
    assert [*calibrated(widths=DRAFT_WIDTHS).measured[1]] == sorted(DRAFT_WIDTHS)
    assert [*calibrated(widths=VERIFY_WIDTHS).measured[1]] == sorted(VERIFY_WIDTHS)
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
        from specd.worker.user_cache import taking_turns
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
    calibrated(widths=(1, 2))  # whatever a first pass leaves for good
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    num_caches = count_caches()
    costs = calibrated(other_model(), (1, 8))
    gc.collect()
    assert count_caches() == num_caches
    assert mx.get_active_memory() <= before
    assert costs.measured


def test_a_calibration_that_is_dropped_leaves_nothing_and_keeps_nothing(kept: Path) -> None:
    steps = calibrate(MODEL, VERIFY_WIDTHS, 60.0)
    for _ in range(5):
        wants = next(steps)
        assert isinstance(wants, Evaluate)
        mx.eval(wants.arrays)
    steps.close()
    gc.collect()
    assert count_caches() == 0
    assert not files(kept)


def count_caches() -> int:
    return sum(isinstance(thing, KVCache) and thing.keys is not None for thing in gc.get_objects())
