"""Ratios between the results at one temperature."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from specd.bench.sample import SetupResult
from specd.bench.setup import MLX_LM, SPECD, Setup
from specd.sampling import Acceptance


def compare(results: Sequence[SetupResult]) -> dict[str, float]:
    """Return ratios by name: the best specd to its target alone and to the best mlx-lm, and between acceptance rules.

    The best specd is the fastest contender that samples from the target's own distribution, adaptive ones included.
    The best adaptive contender is also compared with all these, and with the best fixed k. mlx-lm may be missing.
    """
    by_setup = {result.setup: result for result in results}
    own, mlx_lm = (
        [result for result in results if result.setup.system == system and result.setup.speculates]
        for system in (SPECD, MLX_LM)
    )
    best, best_mlx_lm = _best(own), _best(mlx_lm) if mlx_lm else None
    verdicts = {f"best specd ({best.setup.label}) / specd with the target alone": best.speedup}
    if best_mlx_lm:
        verdicts[f"best specd / best mlx-lm ({best_mlx_lm.setup.label})"] = best.speedup / best_mlx_lm.speedup
    if best.of_limit is not None:
        verdicts["best specd, % of its limit"] = 100 * best.of_limit
    verdicts.update(_by_adaptive(own, best_mlx_lm))
    if best_mlx_lm:
        plain_mlx_lm = by_setup[replace(best_mlx_lm.setup, num_draft_tokens=0)]  # it comes before all with a draft
        verdicts["time to first token, best specd / mlx-lm"] = (
            best.time_to_first_token_seconds / plain_mlx_lm.time_to_first_token_seconds
        )
    verdicts["wire and coordinator, ms a round"] = best.round_milliseconds["wire_and_coordinator"]
    if best.setup.temperature:
        verdicts.update(_by_acceptance(by_setup))
    verdicts.update(_by_lenience(by_setup))
    return verdicts


def _best(results: Iterable[SetupResult]) -> SetupResult:
    return max(results, key=lambda result: (result.setup.is_faithful, result.speedup))


def _by_adaptive(own: Sequence[SetupResult], best_mlx_lm: SetupResult | None) -> Iterator[tuple[str, float]]:
    """Yield the ratios of the best adaptive contender, if there is one."""
    adaptive = [result for result in own if result.setup.is_adaptive]
    fixed = [result for result in own if not result.setup.is_adaptive]
    if not adaptive:
        return
    best = _best(adaptive)
    name = best.setup.label
    yield f"{name} / specd with the target alone", best.speedup
    if best_mlx_lm:
        yield f"{name} / best mlx-lm ({best_mlx_lm.setup.label})", best.speedup / best_mlx_lm.speedup
    if fixed:
        best_fixed = _best(fixed)
        yield f"{name} / best fixed k ({best_fixed.setup.label})", best.speedup / best_fixed.speedup
    if best.of_limit is not None:
        yield f"{name}, % of its limit", 100 * best.of_limit


def _by_acceptance(results: dict[Setup, SetupResult]) -> Iterator[tuple[str, float]]:
    """Yield the ratios of COUPLED to REJECTION and to mlx-lm, without greedy decoding, where all accept the same."""
    for name, changes in (
        ("COUPLED / REJECTION", {"acceptance": Acceptance.REJECTION}),
        ("COUPLED / mlx-lm (independent sampling)", {"system": MLX_LM}),
    ):
        for setup, own in results.items():
            if setup.system == SPECD and setup.speculates and not setup.rejects:
                per_try = _quotient(own, results.get(replace(setup, **changes)))
                if per_try is not None:
                    yield f"{name}, accepted per try, {setup.draft_label}", per_try


def _by_lenience(results: dict[Setup, SetupResult]) -> Iterator[tuple[str, float]]:
    for setup, own in results.items():
        plain = results.get(replace(setup, lenience=0.0))
        per_try = _quotient(own, plain)
        if setup.lenience and plain is not None and per_try is not None:
            name = f"lenience {setup.lenience:g} / lenience 0"
            yield f"{name}, accepted per try, {setup.draft_label}", per_try
            yield f"{name}, speed-up, {setup.draft_label}", own.speedup / plain.speedup


def _quotient(own: SetupResult, other: SetupResult | None) -> float | None:
    """Return the ratio of the acceptances per try, if both have any."""
    if other is None or not own.acceptance_per_try or not other.acceptance_per_try:
        return None
    return own.acceptance_per_try / other.acceptance_per_try
