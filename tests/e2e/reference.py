"""What mlx-lm's own decoding with the target alone gives, which is what specd must give."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step

from specd.worker.model.loader import LoadedModel


def decode_with_mlx_lm(target: LoadedModel, prompt_ids: list[int], max_tokens: int, **options: Any) -> list[int]:
    """Decode up to and with an end token; `options` are those of mlx-lm's generate_step."""
    token_ids: list[int] = []
    for token_id, _ in generate_step(mx.array(prompt_ids), target.network, max_tokens=max_tokens, **options):
        token_ids.append(int(token_id))
        if token_id in target.info.eos_token_ids:
            break
    return token_ids
