"""What samples of contenders that took turns on the same prompts say about each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from tokenizers import Tokenizer

from specd.bench.prompts import load_prompts
from specd.bench.sample import Sample
from specd.settings import EMBEDDED_TARGET

MAX_PROMPT_TOKENS = 512

Samples = Mapping[str, Sequence[Sample]]


def encode_prompts(count: int) -> dict[str, list[int]]:
    """Return the ids of so many of the prompts that are not long, from all over them."""
    tokenizer = Tokenizer.from_file(str(Path(EMBEDDED_TARGET) / "tokenizer.json"))
    prompts = {name: tokenizer.encode(text).ids for name, text in load_prompts().items()}
    names = [name for name, ids in prompts.items() if len(ids) <= MAX_PROMPT_TOKENS]
    count = min(count, len(names))
    return {name: prompts[name] for name in (names[i * len(names) // count] for i in range(count))}


def have_same_tokens(samples: Samples) -> bool:
    """Return whether all contenders said the same."""
    texts = [[sample.token_ids for sample in own] for own in samples.values()]
    return all(text == texts[0] for text in texts)


def median_ratio(own: Sequence[Sample], baseline: Sequence[Sample]) -> float:
    """Return the median of the ratios of tokens per second, sample by sample; 0 without any that has a speed."""
    ratios = [a.tokens_per_second / b.tokens_per_second for a, b in _pairs(own, baseline)]
    return median(ratios) if ratios else 0.0


def ratio_of_totals(own: Sequence[Sample], baseline: Sequence[Sample]) -> float:
    """Return the ratio of the tokens per second of all samples together; 0 without any that has a speed."""
    pairs = _pairs(own, baseline)
    return sum(b.decode_seconds for _, b in pairs) / sum(a.decode_seconds for a, _ in pairs) if pairs else 0.0


def _pairs(own: Sequence[Sample], baseline: Sequence[Sample]) -> list[tuple[Sample, Sample]]:
    # Sampled texts can end with their first token, which has no speed.
    pairs = zip(own, baseline, strict=True)
    return [(a, b) for a, b in pairs if a.tokens_per_second and b.tokens_per_second]


def records(samples: Samples) -> dict[str, list[dict[str, object]]]:
    """Return all samples for a report."""
    return {name: [sample.as_record() for sample in own] for name, own in samples.items()}
