"""Look-up beside the draft model, both together, mlx-lm and transformers' prompt look-up, on four kinds of work.

    python benchmarks/lookup.py [-n 128] [--num-prompts 12] [--repeats 1] [--json FILE]

specd with the target alone, with the draft model alone (its k chosen each round), with look-up alone, with both, and
with the right text as prediction; mlx-lm's plain and speculative decoding in process; transformers with
`prompt_lookup_num_tokens`, on the same weights, if PyTorch is there. All take turns prompt by prompt. Speeds are
medians of tokens after the first over seconds after the first; ratios are medians over the prompts of a kind. Then
eight sessions of all kinds at once, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

import specd.worker.cpu.openblas

BLAS = specd.worker.cpu.openblas.load_blas(2)  # before MLX

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model
from repeating_work import KINDS

from specd.bench.contenders import MlxLm
from specd.bench.environment import console, environment, new_table
from specd.bench.setup import MLX_LM, Setup
from specd.bench.turns import rotated
from specd.client import NO_RETRIES, AsyncClient
from specd.launch import complain
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.supervisor import NO_PREFIX_CACHE, Stack
from specd.text.tokenizer import Tokenizer
from specd.worker.model.loader import load

# Returns the tokens, and the seconds after the first.
Decode = Callable[[list[int], list[int]], Awaitable[tuple[list[int], float]]]

ALONE, MODEL, LOOKUP, BOTH, PREDICTED = (
    "target alone",
    "draft model",
    "look-up",
    "both",
    "predicted",
)
_FIELDS: dict[str, dict[str, Any]] = {
    ALONE: {"draft_source": "none"},
    MODEL: {"draft_source": "model"},
    LOOKUP: {"draft_source": "lookup"},
    BOTH: {},
}


def specd_contender(client: AsyncClient, name: str, max_tokens: int) -> Decode:
    """Return a way of specd to decode."""

    async def decode(prompt: list[int], expected: list[int]) -> tuple[list[int], float]:
        fields = _FIELDS.get(name) or ({"prediction": expected} if name == PREDICTED and expected else {})
        token_ids: list[int] = []
        first_at = last_at = 0.0
        async for response in client.generate(prompt, max_tokens=max_tokens, **fields).messages():
            last_at = time.perf_counter()
            first_at = first_at or last_at
            token_ids.extend(token.id for token in response.tokens)
        return token_ids, last_at - first_at

    return decode


def mlx_lm_contender(target: Any, draft: Any, k: int, max_tokens: int) -> Decode:
    """Return mlx-lm's decoding, speculative with k > 0."""
    contender = MlxLm(target, draft, Setup(MLX_LM, k))

    async def decode(prompt: list[int], _: list[int]) -> tuple[list[int], float]:
        sample = await contender.decode("", 0, prompt, max_tokens)
        return list(sample.token_ids), sample.decode_seconds

    return decode


def transformers_contender(directory: Path, max_tokens: int, *, prompt_lookup: int) -> Decode | None:
    """Return transformers' decoding with prompt look-up, or plain with 0; None without PyTorch."""
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError:
        return None
    torch.set_num_threads(2)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    options = {"prompt_lookup_num_tokens": prompt_lookup} if prompt_lookup else {}

    async def decode(prompt: list[int], _: list[int]) -> tuple[list[int], float]:
        seconds, generated = [], torch.tensor([prompt])
        for most in (1, max_tokens):
            began_at = time.perf_counter()
            with torch.no_grad():
                generated = model.generate(
                    torch.tensor([prompt]), max_new_tokens=most, do_sample=False, **(options if most > 1 else {})
                )
            seconds.append(time.perf_counter() - began_at)
        return [int(token) for token in generated[0, len(prompt) :]], max(seconds[1] - seconds[0], 1e-6)

    return decode


def save_for_transformers(target: Any, directory: Path) -> None:
    """Write the target with the weights that it computes with, in float32, as transformers reads it."""
    network = dequantize_model(target.network)
    parameters: Any = tree_flatten(network.parameters())
    weights = {name: array.astype(mx.float32) for name, array in parameters}
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "pt"})
    config = json.loads((Path(EMBEDDED_TARGET) / "config.json").read_text())
    for name in ("quantization", "quantization_config"):
        config.pop(name, None)
    (directory / "config.json").write_text(json.dumps(config))
    shutil.copy(Path(EMBEDDED_TARGET) / "tokenizer.json", directory)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return speeds by kind and contender, and the throughput of eight sessions."""
    target, draft = load(EMBEDDED_TARGET, blas=BLAS), load(EMBEDDED_DRAFT, blas=BLAS)
    tokenizer = Tokenizer(target.tokenizer_json)
    prompts = {
        kind: [tokenizer.encode(text) for text in texts()[: options.num_prompts]] for kind, texts in KINDS.items()
    }
    n = options.max_tokens
    async with (
        Stack(target=EMBEDDED_TARGET, draft=EMBEDDED_DRAFT, environment=NO_PREFIX_CACHE) as stack,
        AsyncClient(stack.address, retries=NO_RETRIES) as client,
    ):
        contenders = {name: specd_contender(client, name, n) for name in (*_FIELDS, PREDICTED)}
        for k in (0, 3, 5, 7):
            contenders[f"mlx-lm, k = {k}" if k else "mlx-lm"] = mlx_lm_contender(target, draft, k, n)
        with tempfile.TemporaryDirectory() as directory:
            own = load(EMBEDDED_TARGET, blas=BLAS)
            save_for_transformers(own, Path(directory))
            for count in (0, 5, 10):
                contender = transformers_contender(Path(directory), n, prompt_lookup=count)
                if contender is not None:
                    contenders[f"transformers, look-up {count}" if count else "transformers"] = contender
        results = {}
        for kind, own_prompts in prompts.items():
            speeds: dict[str, list[float]] = {name: [] for name in contenders}
            same = dict.fromkeys(contenders, 0)
            for turn, prompt in enumerate(own_prompts * options.repeats):
                expected, _ = await contenders[ALONE](prompt, [])
                for name in rotated(contenders, turn):
                    token_ids, seconds = await contenders[name](prompt, expected)
                    same[name] += token_ids == expected
                    speeds[name].append((len(token_ids) - 1) / max(seconds, 1e-6))
            results[kind] = {
                name: {
                    "tokens_per_second": median(own_speeds),
                    "to_target_alone": median(a / b for a, b in zip(own_speeds, speeds[ALONE], strict=True)),
                    "to_draft_model": median(a / b for a, b in zip(own_speeds, speeds[MODEL], strict=True)),
                    "same_tokens": same[name] / len(own_speeds),
                }
                for name, own_speeds in speeds.items()
            }
        together = await measure_together(client, prompts, options)
    return {"one": results, "eight": together}


async def measure_together(
    client: AsyncClient, prompts: dict[str, list[list[int]]], options: argparse.Namespace
) -> dict[str, float]:
    """Return tokens per second of eight sessions of all kinds at once, by source, medians of turns."""
    requests = [prompt for of_kinds in zip(*prompts.values(), strict=True) for prompt in of_kinds]
    rates: dict[str, list[float]] = {name: [] for name in _FIELDS}
    for turn in range(max(options.repeats, 3)):
        for name in rotated(rates, turn):
            waiting, num_tokens = requests[::-1], 0
            decode = specd_contender(client, name, options.max_tokens)

            async def keep_asking(waiting: list[list[int]] = waiting, decode: Decode = decode) -> int:
                count = 0
                while waiting:
                    count += len((await decode(waiting.pop(), []))[0])
                return count

            began_at = time.perf_counter()
            num_tokens = sum(await asyncio.gather(*(keep_asking() for _ in range(8))))
            rates[name].append(num_tokens / (time.perf_counter() - began_at))
    return {name: median(own) for name, own in rates.items()}


def main() -> None:
    """Measure, print the tables, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", "--max-tokens", type=int, default=128)
    parser.add_argument("--num-prompts", type=int, default=12, help="of each kind")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report = asyncio.run(measure(options))
    output = console()
    for kind, rows in report["one"].items():
        table = new_table(kind, ("tokens\n/s", "/ target\nalone", "/ draft\nmodel", "same\ntokens"))
        for name, row in rows.items():
            table.add_row(
                name,
                f"{row['tokens_per_second']:.1f}",
                f"{row['to_target_alone']:.2f}",
                f"{row['to_draft_model']:.2f}",
                f"{row['same_tokens']:.0%}",
            )
        output.print(table)
    table = new_table("eight sessions of all kinds", ("tokens\n/s",))
    for name, speed in report["eight"].items():
        table.add_row(name, f"{speed:.1f}")
    output.print(table)
    if options.json:
        facts = {"max_tokens": options.max_tokens, "num_prompts": options.num_prompts, "repeats": options.repeats}
        options.json.write_text(json.dumps({"environment": environment(**facts), **report}, indent=1) + "\n")
    if any(row["same_tokens"] < 1 for rows in report["one"].values() for name, row in rows.items() if name in _FIELDS):
        complain("the texts differ")
        raise SystemExit(1)


if __name__ == "__main__":
    main()
