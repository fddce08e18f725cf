"""Everything that decides specd's speed on a GPU, in one run of a few minutes: python benchmarks/accelerator.py.

    python benchmarks/accelerator.py --target DIR --draft DIR --json FILE            # a pair of models, on a Mac too
    python benchmarks/accelerator.py --shape 8b --bits 4 --json FILE                 # random models of Qwen3's sizes

The parts, in this order; `--parts` selects some of them:

- raw: passes of mlx-lm in this process, each waited for, by width
- mlx-lm: its `stream_generate`, alone and with the draft, and the draft's own loop
- target-only: specd without a draft
- verify: verifies by width, on a stream to the target worker
- draft: proposals by length, on a stream to the draft worker
- replay: a draft that costs nothing and replays the target's text, of which 0.6 or 0.8 is accepted
- replay-device: the same with the passes of the real draft
- real-draft: the draft itself; a random one is never right
- sessions: one and eight sessions

It prints as it goes and writes JSON after each part. A part that fails, or takes longer than its limit, keeps what it
has, and the next one runs. At the end come the ratios that count, each beside the wanted one. The limit of a run is
the speed that raw passes would give for its rounds: the tokens over the times of mlx-lm's passes of the same widths.
Random models are made at first and kept in `--models`; they count (`random_models.py`), so their texts never end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wanted_ratios import print_ratios, ratios, raw_curve

import specd.launch  # noqa: F401  # before gRPC, for its pollers
from specd.worker.cpu.openblas import load_blas

if TYPE_CHECKING:
    from served_models import ServedModels

# The longest that a part may take, in seconds.
LIMITS = {
    "raw": 45,
    "mlx-lm": 40,
    "start": 150,
    "target-only": 15,
    "verify": 35,
    "draft": 20,
    "replay": 60,
    "replay-device": 60,
    "real-draft": 30,
    "sessions": 40,
}
PARTS = [name for name in LIMITS if name != "start"]
_IN_PROCESS = ("raw", "mlx-lm")
_RAW_PASSES = 30
_VERIFIES = 67  # for each width, so that those of three widths are 200
_PROPOSALS = 20


@dataclass
class Run:
    """The settings of a run, and what it has measured."""

    target: str
    draft: str
    parts: Sequence[str]
    seconds: float
    json_path: Path | None
    facts: Mapping[str, object]
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    started_at: float = field(default_factory=time.perf_counter)

    async def part(self, name: str, measure: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
        """Measure a part within its limit, and write what there is. Its errors are printed, not raised."""
        now = time.perf_counter() - self.started_at
        limit = min(LIMITS[name], self.seconds - now)
        if limit <= 0:
            print(f"[{now:6.1f} s] {name}: left out, because the {self.seconds:g} s are over", flush=True)
            return
        print(f"[{now:6.1f} s] {name}", flush=True)
        own = self.results.setdefault(name, {})
        try:
            async with asyncio.timeout(limit):
                await measure(own)
        except TimeoutError:
            own["error"] = f"stopped after {limit:.0f} s"
        except Exception as error:  # of any kind: the next part runs
            own["error"] = f"{type(error).__name__}: {error}"
        finally:
            own["seconds"] = time.perf_counter() - self.started_at - now
            self.write()
        if "error" in own:
            print(f"    FAILED: {own['error']}", flush=True)

    def write(self) -> None:
        """Write the JSON."""
        if self.json_path is not None:
            rows = [{"what": what, "value": value, "wanted": wanted} for what, value, wanted in ratios(self.results)]
            report = {"environment": self.facts, "ratios": rows, "parts": self.results}
            self.json_path.write_text(json.dumps(report, indent=1) + "\n")


def show(name: str, values: Mapping[str, Any]) -> None:
    """Print one line of results."""
    shown = (f"{key} {value:.2f}" for key, value in values.items() if isinstance(value, float))
    print(f"    {name}: {', '.join(shown)}", flush=True)


async def measure(run: Run, prompts: Mapping[str, list[int]]) -> None:
    """Measure all parts."""
    await _measure_in_process(run, next(iter(prompts.values())))
    wanted = [name for name in run.parts if name not in _IN_PROCESS]
    if not wanted:
        return
    from served_models import ServedModels

    async with AsyncExitStack() as running:
        served = ServedModels(run.target, run.draft, prompts, needs_replays=not {*wanted} <= {*_WITHOUT_REPLAYS})

        async def start(own: dict[str, Any]) -> None:
            await running.enter_async_context(served.running())

        await run.part("start", start)
        if "error" not in run.results.get("start", {"error": ""}):
            for name in wanted:
                await run.part(name, partial(_SERVED[name], served, run.results))


async def _measure_in_process(run: Run, prompt: Sequence[int]) -> None:
    """Measure mlx-lm. Its models are freed at the end, because the workers load them too."""
    import mlx.core as mx
    from raw_passes import WIDTHS, PlainModel

    models: dict[str, PlainModel] = {}

    def model(name: str) -> PlainModel:
        if name not in models:
            models[name] = PlainModel(name)
        return models[name]

    async def raw(own: dict[str, Any]) -> None:
        for cache, grows in (("growing", True), ("one length", False)):
            for width in WIDTHS:
                passes = await model(run.target).passes(width, _RAW_PASSES, grows=grows)
                own.setdefault(cache, {})[str(width)] = passes
                show(f"{width} wide, {cache}", passes)

    async def mlx_lm(own: dict[str, Any]) -> None:
        target = model(run.target)
        own["tokens_per_second"] = [await target.generate(prompt, 128) for _ in range(2)]
        print(f"    stream_generate: {own['tokens_per_second'][-1]:.1f} tokens/s", flush=True)
        draft = model(run.draft)
        own["draft_step_ms"] = await draft.step_milliseconds(prompt, 96)
        own["draft_pass"] = await draft.passes(1, _RAW_PASSES, grows=True)
        show("draft", {"ms a token": own["draft_step_ms"], "ms a pass waited for": own["draft_pass"]["median_ms"]})
        own["speculative_tokens_per_second"] = [await target.generate(prompt, 48, draft) for _ in range(2)]
        print(f"    with the draft: {own['speculative_tokens_per_second'][-1]:.1f} tokens/s", flush=True)

    for name, part in (("raw", raw), ("mlx-lm", mlx_lm)):
        if name in run.parts:
            await run.part(name, part)
    models.clear()
    gc.collect()
    mx.clear_cache()


async def _target_only(served: ServedModels, results: Mapping[str, Any], own: dict[str, Any]) -> None:
    await served.contest(served.client, [0], own, raw=raw_curve(results))


async def _verify(served: ServedModels, results: Mapping[str, Any], own: dict[str, Any]) -> None:
    from worker_streams import verify

    for width in (1, 2, 4, 8):
        own[str(width)] = await verify(served.target_address, served.long_prompt, width, _VERIFIES)
        show(f"{width} wide", own[str(width)])


async def _draft(served: ServedModels, results: Mapping[str, Any], own: dict[str, Any]) -> None:
    from worker_streams import propose

    cases: dict[str, dict[str, Any]] = {f"k = {k}": {"k": k} for k in (1, 4, 8)}
    cases["k = 4, all accepted"] = {"k": 4, "accepted": True}
    cases["k = 4, with confidences"] = {"k": 4, "confidences": True}
    for name, options in cases.items():
        own[name] = await propose(served.draft_address, served.long_prompt, count=_PROPOSALS, **options)
        show(name, own[name])


async def _replay(served: ServedModels, results: Mapping[str, Any], own: dict[str, Any], *, computes: bool) -> None:
    for acceptance in (0.8, 0.6):
        rows = own.setdefault(f"{acceptance:g}", {})
        print(f"  {acceptance:g} accepted", flush=True)
        client = served.replayed[acceptance, computes]
        await served.contest(client, [0, 3, 7, None], rows, raw=raw_curve(results))


async def _real_draft(served: ServedModels, results: Mapping[str, Any], own: dict[str, Any]) -> None:
    await served.contest(served.client, [0, None, 3], own, raw=raw_curve(results))


async def _sessions(served: ServedModels, results: Mapping[str, Any], own: dict[str, Any]) -> None:
    replayed = served.replayed[0.8, False]
    for name, client, k in (("target only", served.client, 0), ("k = 3", replayed, 3), ("adaptive", replayed, None)):
        for sessions in (1, 8):
            speed = await served.throughput(client, k, sessions)
            own.setdefault(name, {})[str(sessions)] = speed
            print(f"    {name}, {sessions}: {speed:.1f} tokens/s", flush=True)


_SERVED: dict[str, Callable[..., Awaitable[None]]] = {
    "target-only": _target_only,
    "verify": _verify,
    "draft": _draft,
    "replay": partial(_replay, computes=False),
    "replay-device": partial(_replay, computes=True),
    "real-draft": _real_draft,
    "sessions": _sessions,
}
_WITHOUT_REPLAYS = ("target-only", "verify", "draft", "real-draft")


def models_of(options: argparse.Namespace) -> tuple[str, str]:
    """Return the target and the draft, which are made if they are random and not there yet."""
    if options.shape is None:
        return options.target, options.draft
    from random_models import save_qwen3

    draft_size = options.draft_shape or ("tiny" if options.shape == "tiny" else "0.6b")
    paths = []
    for size, stride in ((options.shape, 1), (draft_size, 2)):
        path = options.models / f"{size}-{options.bits or 16}bit-stride-{stride}"
        if not (path / "config.json").exists():  # which is written last
            save_qwen3(size, path, bits=options.bits, stride=stride)
        paths.append(str(path))
    return paths[0], paths[1]


async def _until_stopped(work: Awaitable[None]) -> None:
    """Await the work; SIGTERM ends it as Ctrl-C does, with the processes that it has started."""
    task = asyncio.ensure_future(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await task


def main() -> None:
    """Measure, print the ratios, write JSON."""
    sizes = ["8b", "32b", "1.7b", "0.6b", "tiny"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="directory or repository of a model")
    parser.add_argument("--draft", help="a model with the target's tokenizer")
    parser.add_argument("--shape", choices=sizes, help="a random target of this size, instead of --target")
    parser.add_argument("--draft-shape", choices=sizes, help="the size of its random draft (default: 0.6b)")
    parser.add_argument("--bits", type=int, default=0, choices=[0, 4, 8], help="of random models; 0: bfloat16")
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "specd-random-models")
    parser.add_argument("--parts", default=",".join(PARTS), help="names with commas (default: all)")
    parser.add_argument("--seconds", type=float, default=240, help="for all parts together")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of BLAS, on a CPU")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    parts = [part.strip() for part in options.parts.split(",")]
    if unknown := {*parts} - {*PARTS}:
        parser.error(f"there is no part {', '.join(unknown)}: choose from {', '.join(PARTS)}")
    if options.shape is None and not (options.target and options.draft):
        parser.error("name a pair by --target and --draft, or a size by --shape")
    os.environ.setdefault("SPECD_LOG_LEVEL", "warning")
    blas = load_blas(options.threads)

    import mlx.core as mx

    from specd.bench.environment import environment
    from specd.bench.prompts import encode, load_prompts, short, spread
    from specd.worker.model.directory import find

    target, draft = models_of(options)
    mx.clear_cache()
    facts = environment(
        blas=blas,
        device=str(mx.device_info().get("device_name", mx.default_device())),
        target=Path(target).name,
        draft=Path(draft).name,
        shape=options.shape,
        bits=options.bits,
    )
    print(json.dumps(facts), flush=True)
    prompts = spread(short(encode(load_prompts(), (find(target) / "tokenizer.json").read_bytes())), 8)
    run = Run(target, draft, [part for part in PARTS if part in parts], options.seconds, options.json, facts)
    with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
        asyncio.run(_until_stopped(measure(run, prompts)))
    print(f"[{time.perf_counter() - run.started_at:6.1f} s] the ratios", flush=True)
    print_ratios(run.results)
    run.write()


if __name__ == "__main__":
    main()
