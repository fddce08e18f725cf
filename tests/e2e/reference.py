"""The tokens of mlx-lm's own decoding with the target alone, which specd must give too."""

from __future__ import annotations

import itertools
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step

from specd.worker.model.loader import LoadedModel
from specd.worker.sampling.noise import Noise, Purpose


def decode_with_mlx_lm(target: LoadedModel, prompt_ids: list[int], max_tokens: int, **options: Any) -> list[int]:
    """Decode up to and with an end token; `options` are those of mlx-lm's generate_step."""
    token_ids: list[int] = []
    for token_id, _ in generate_step(mx.array(prompt_ids), target.network, max_tokens=max_tokens, **options):
        token_ids.append(int(token_id))
        if token_id in target.info.eos_token_ids:
            break
    return token_ids


def sample_with_mlx_lm(
    target: LoadedModel, prompt_ids: list[int], max_tokens: int, *, temperature: float, seed: int
) -> list[int]:
    """Decode likewise at a temperature, with specd's random numbers for the seed instead of mlx-lm's."""
    if temperature == 0:
        return decode_with_mlx_lm(target, prompt_ids, max_tokens)
    noise = Noise(seed, target.info.vocabulary_size)
    # mlx-lm asks for a token before it has handed out the one before.
    positions = itertools.count(len(prompt_ids))

    def sampler(log_probabilities: mx.array) -> mx.array:
        gumbel = noise.gumbel(Purpose.SAMPLE, next(positions), 1)
        return mx.argmax(log_probabilities / mx.array(temperature, mx.float32) + gumbel, axis=-1)

    return decode_with_mlx_lm(target, prompt_ids, max_tokens, sampler=sampler)
