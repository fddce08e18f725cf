"""The ratios that decide specd's speed on a GPU, each beside the wanted one, from the results of `accelerator.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Any

# What is compared, the ratio, and the wanted one, which can be empty.
Ratio = tuple[str, float, str]
_MET: dict[str, Callable[[float, float], bool]] = {
    ">=": lambda value, bound: value >= bound,
    "<=": lambda value, bound: value <= bound,
    ">": lambda value, bound: value > bound,
}


def raw_curve(results: Mapping[str, Any]) -> dict[int, float]:
    """Return the milliseconds of a raw pass by width, at one length or at growing ones: the smaller."""
    curves = [_of(results, "raw", cache) for cache in ("growing", "one length")]
    widths = sorted({int(width) for curve in curves for width in curve})
    return {width: min(curve[str(width)]["median_ms"] for curve in curves if str(width) in curve) for width in widths}


def ratios(results: Mapping[str, Any]) -> Iterator[Ratio]:
    """Yield the ratios whose parts were measured."""
    for of_line in (_target_only, _verifies, _draft_tokens, _speculation, _sessions):
        yield from of_line(results)


def print_ratios(results: Mapping[str, Any]) -> None:
    """Print the ratios, with a mark where one is missed."""
    for what, value, wanted in ratios(results):
        sign, _, bound = wanted.partition(" ")
        is_met = not wanted or _MET[sign](value, float(bound))
        print(f"{what:55} {value:6.2f}  {wanted:8}{'' if is_met else '  MISSED'}", flush=True)


def _target_only(results: Mapping[str, Any]) -> Iterator[Ratio]:
    alone, theirs = _of(results, "target-only", "target alone"), _of(results, "mlx-lm", "tokens_per_second")
    if alone and theirs:
        yield "1. target only / mlx-lm", alone["tokens_per_second"] / median(theirs), ">= 0.95"


def _verifies(results: Mapping[str, Any]) -> Iterator[Ratio]:
    raw = raw_curve(results)
    for width in (2, 4, 8):
        if own := _of(results, "verify", str(width)):
            if width in raw:
                yield f"2. verify of {width} / raw pass", own["compute_ms"] / raw[width], "<= 1.25"
            yield f"2. verify of {width}, longest / median", own["longest_ms"] / own["compute_ms"], "<= 2"


def _draft_tokens(results: Mapping[str, Any]) -> Iterator[Ratio]:
    if step := _of(results, "mlx-lm", "draft_step_ms"):
        for name, own in _rows(results, "draft"):
            yield f"3. draft token, {name} / mlx-lm's step", own["per_token_ms"] / step, "<= 1.1"


def _speculation(results: Mapping[str, Any]) -> Iterator[Ratio]:
    for part, acceptance, of_target, of_limit in (
        ("replay", "0.8", ">= 2.2", ">= 0.85"),
        ("replay", "0.6", "", ">= 0.85"),
        ("replay-device", "0.8", "", ""),
        ("replay-device", "0.6", "", ""),
    ):
        if rows := [row for _, row in _rows(results, part, acceptance) if row["speculates"]]:
            best = max(rows, key=lambda row: row["speedup"])
            yield f"4. {part} {acceptance}, best / target only", best["speedup"], of_target
            if "of_raw_limit" in best:
                yield f"4. {part} {acceptance}, best / limit", best["of_raw_limit"], of_limit
    if adaptive := _of(results, "real-draft", "adaptive"):
        yield "4. the draft itself, adaptive / target only", adaptive["speedup"], ">= 0.97"


def _sessions(results: Mapping[str, Any]) -> Iterator[Ratio]:
    one, eight = (_of(results, "sessions", "target only", number) for number in ("1", "8"))
    if one and eight:
        yield "5. 8 sessions / 1, target only", eight / one, ">= 4"
        if replayed := [own["8"] for name, own in _rows(results, "sessions") if name != "target only" and "8" in own]:
            yield "5. 8 sessions, replay 0.8 / target only", max(replayed) / eight, "> 1"


def _of(results: Mapping[str, Any], *path: str) -> Any:
    """Return a result, or something empty."""
    value: Any = results
    for key in path:
        value = value.get(key, {})
    return value


def _rows(results: Mapping[str, Any], *path: str) -> Iterator[tuple[str, Any]]:
    """Yield the results that have parts themselves, by name: a part also notes its time and its error."""
    yield from ((name, own) for name, own in _of(results, *path).items() if isinstance(own, dict))
