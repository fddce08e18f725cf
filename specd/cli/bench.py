"""The command `specd bench`. It checks the options before it loads anything."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from specd.cli.options import check_sampling
from specd.errors import StartupError
from specd.launch import check_servers_are_installed, start_logging
from specd.sampling import Acceptance, Sampling
from specd.setting_types import MAX_NUM_DRAFT_TOKENS
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.worker.model.outline import check_directories


def bench(
    target: Annotated[str, typer.Option(help="Target model.", show_default=False)] = EMBEDDED_TARGET,
    draft: Annotated[str | None, typer.Option(help="Draft model.", show_default=False)] = None,
    draft_in_target: Annotated[
        bool, typer.Option("--draft-in-target", help="Compute the draft in the target worker, as specd up does.")
    ] = False,
    num_draft_tokens: Annotated[
        list[int] | None,
        typer.Option(
            "--num-draft-tokens",
            "-k",
            min=1,
            max=MAX_NUM_DRAFT_TOKENS,
            help="Draft tokens per round; can be repeated. (default: 3 4 5 7)",
        ),
    ] = None,
    adaptive: Annotated[
        bool | None,
        typer.Option("--adaptive/--no-adaptive", help="Also measure specd with adaptive k. (default: adaptive)"),
    ] = None,
    temperature: Annotated[
        list[float] | None,
        typer.Option("--temperature", "-t", help="0 (greedy) or 0.01 to 100; can be repeated. (default: 0)"),
    ] = None,
    acceptance: Annotated[
        list[Acceptance] | None,
        typer.Option(help="Acceptance rule; can be repeated. (default: coupled)", show_default=False),
    ] = None,
    lenience: Annotated[
        list[float] | None, typer.Option(min=0, max=1, help="Lenience of rejection; can be repeated. (default: 0)")
    ] = None,
    concurrency: Annotated[
        list[int] | None,
        typer.Option("--concurrency", "-c", min=1, help="Measure throughput at this many sessions; can be repeated."),
    ] = None,
    replay: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Replay the target's own texts with this acceptance rate, instead of the tokens of a draft model. It "
            "shows the speed that such a draft would bring. With --draft, that model computes its passes.",
        ),
    ] = None,
    step_ms: Annotated[
        float, typer.Option(min=0, help="With --replay, without --draft: milliseconds per draft token.")
    ] = 0.0,
    cached_prompts: Annotated[
        bool, typer.Option("--cached-prompts", help="With --concurrency: prefill the prompts before measuring.")
    ] = False,
    prompts: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            help='Directory with one prompt per file, or JSON Lines: "…" or {"prompt": "…"}. (default: specd\'s own)',
        ),
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Number of prompts to use, evenly spaced.")] = 8,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=2, help="Tokens to generate per prompt.")] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="Passes over all prompts.")] = 1,
    blas_threads: Annotated[int, typer.Option(min=1, help="OpenBLAS threads, on a Linux CPU.")] = os.cpu_count() or 1,
    json_path: Annotated[
        Path | None,
        typer.Option("--json", dir_okay=False, writable=True, help="Write results and samples to this file."),
    ] = None,
    plot_path: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            dir_okay=False,
            writable=True,
            help="Plot speed-up and acceptance rate over k as PNG. Needs matplotlib.",
        ),
    ] = None,
) -> None:
    """Compare specd with its target alone and with mlx-lm, on the same prompts."""
    for value in temperature or ():
        check_sampling(Sampling(temperature=value))
    if concurrency and (temperature or acceptance or lenience):
        raise StartupError("--concurrency measures greedy decoding: drop --temperature, --acceptance and --lenience")
    if concurrency and plot_path is not None:
        raise StartupError("--plot shows one session for each k: drop --plot or --concurrency")
    if cached_prompts and not concurrency:
        raise StartupError("--cached-prompts needs --concurrency: add it")
    if replay is not None and (any(temperature or ()) or Acceptance.REJECTION in (acceptance or ())):
        raise StartupError("--replay is for greedy decoding: drop --temperature and --acceptance")
    if replay is not None and draft_in_target:
        raise StartupError("--replay replays texts from a worker of its own: drop --draft-in-target")
    if step_ms and (replay is None or draft is not None):
        raise StartupError("--step-ms is for --replay without a draft model: add --replay, or drop --draft")
    if any(lenience or ()) and Acceptance.REJECTION not in (acceptance or ()):
        raise StartupError("--lenience needs rejection: add --acceptance rejection")
    if plot_path is not None and plot_path.suffix.lower() != ".png":
        raise StartupError(f"--plot writes PNG, but {plot_path} does not end in .png: rename it")
    for path in (json_path, plot_path):
        _check_can_be_written(path)

    check_servers_are_installed()
    draft = draft if draft is not None else "" if replay is not None else EMBEDDED_DRAFT
    check_directories(target, draft, in_target=draft_in_target)  # MLX takes seconds to import
    from specd.worker.cpu.openblas import load_blas

    os.environ.setdefault("SPECD_LOG_LEVEL", "warning")
    start_logging("bench")
    blas = load_blas(blas_threads)  # sets variables that the workers inherit

    from specd.bench.plot import require_matplotlib
    from specd.bench.prompts import load_prompts, spread
    from specd.bench.run import Options, run_bench, run_throughput

    if plot_path is not None:
        require_matplotlib()
    options = Options(
        target=target,
        draft=draft,
        prompts=spread(load_prompts(prompts), num_prompts) if prompts is not None else {},
        draft_in_target=draft_in_target,
        num_prompts=num_prompts,
        num_draft_tokens=num_draft_tokens or [3, 4, 5, 7],
        max_tokens=max_tokens,
        repeats=repeats,
        blas=blas,
        temperatures=temperature or [0.0],
        acceptance=acceptance or [Acceptance.COUPLED],
        lenience=lenience or [0.0],
        adaptive=adaptive is not False,
        concurrency=concurrency or [],
        cached_prompts=cached_prompts,
        replay=replay,
        step_seconds=step_ms / 1000,
    )
    same = run_throughput(options, json_path) if concurrency else run_bench(options, json_path, plot_path)
    if not same:
        raise typer.Exit(1)


def _check_can_be_written(path: Path | None) -> None:
    """Raise StartupError, before a long measurement, if a file cannot be created."""
    if path is None or path.exists():
        return
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise StartupError(f"cannot write {path}: {path.parent}: {error.strerror}") from error
