"""Tiny random T5s and what transformers computes with them: `python -m tests.worker.t5_reference` writes tests/data/t5.

Needs torch, which the tests do not need, because they compare with the written file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

DIRECTORY = Path(__file__).parents[1] / "data" / "t5"
SOURCE_LENGTHS = (1, 5, 40, 150)
ANSWER_LENGTH = 40

_SMALL: dict[str, Any] = {
    "vocab_size": 48,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 3,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "decoder_start_token_id": 0,
}
# By what they stand for; the first is the class of transformers.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5-v1.0": ("T5", {"feed_forward_proj": "relu"}),
    "t5-v1.1": ("T5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "flan": ("T5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_decoder_layers": 3}),
    "mt5": ("MT5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "ul2": ("T5", {"feed_forward_proj": "gated-silu", "tie_word_embeddings": False}),
    "codet5": ("T5", {"feed_forward_proj": "relu", "relative_attention_num_buckets": 32, "eos_token_id": 2}),
}


def source(length: int) -> list[int]:
    """Return a source of this many tokens."""
    return [2 + 7 * i * (length + i) % 45 for i in range(length)]


def answer() -> list[int]:
    """Return the tokens of an answer, from the start token on."""
    return [0, *(1 + 11 * i * i % 46 for i in range(ANSWER_LENGTH - 1))]


def main() -> None:
    """Write them all."""
    import torch  # type: ignore[import-not-found,unused-ignore]
    import transformers
    from safetensors.torch import save_file

    for name, (kind, changes) in VARIANTS.items():
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**_SMALL | changes)
        model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.2 * torch.randn(weight.shape))
            expected = {}
            for length in SOURCE_LENGTHS:
                ids = torch.tensor([source(length)])
                output = model(input_ids=ids, decoder_input_ids=torch.tensor([answer()]))
                expected[f"encoded {length}"] = output.encoder_last_hidden_state[0].contiguous()
                expected[f"logits {length}"] = output.logits[0].contiguous()
        model.save_pretrained(DIRECTORY / name)
        (DIRECTORY / name / "generation_config.json").unlink(missing_ok=True)
        save_file(expected, DIRECTORY / name / "expected.safetensors")


if __name__ == "__main__":
    main()
