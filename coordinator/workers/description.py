"""Checks of a worker's description of itself."""

from __future__ import annotations

from specd.cache_footprint import CacheFootprint
from specd.model_info import ModelInfo

_LARGEST_VOCABULARY = 2**22
_LONGEST_CONTEXT = 2**31 - 1
_MOST_CHARACTERS = 4096  # in a name, the limit of paths
_MOST_END_TOKENS = 1024
_MOST_ADAPTERS = 1024
_MOST_PARTS = 1024  # kinds of layers, by the number of tokens that they keep
_MOST_BYTES_PER_TOKEN = 2**40


def check_description(model: ModelInfo, footprint: CacheFootprint, incarnation: str, kernel_class: str = "") -> None:
    """Raise ValueError unless a worker describes a possible model."""
    of_adapters = [text for adapter in model.adapters for text in (adapter.name, adapter.fingerprint)]
    texts = (model.name, model.architecture, model.precision, model.device, incarnation, kernel_class)
    digests = (model.fingerprint, model.vocabulary_fingerprint, model.whole_fingerprint)
    if not incarnation:
        raise ValueError("it has no incarnation: start a worker of this version of specd")
    if not all(text.isprintable() and len(text) <= _MOST_CHARACTERS for text in (*texts, *digests, *of_adapters)):
        raise ValueError("its texts are too long, or have characters that cannot be shown")
    if not 0 < model.vocabulary_size <= _LARGEST_VOCABULARY:
        raise ValueError(f"its vocabulary has an impossible number of tokens, {model.vocabulary_size}")
    if not 0 < model.context_length <= _LONGEST_CONTEXT:
        raise ValueError(f"its context has an impossible number of tokens, {model.context_length}")
    names = {model.public_name, *(adapter.name for adapter in model.adapters)}
    if not all(of_adapters) or len(names) != len(model.adapters) + 1 or len(names) > _MOST_ADAPTERS:
        raise ValueError(f"it has impossible adapters, {len(model.adapters)} of them")
    if len(model.eos_token_ids) > _MOST_END_TOKENS:
        raise ValueError(f"it has invalid end tokens, {len(model.eos_token_ids)} of them")
    if (model.decoder_start_token_id or 0) >= model.vocabulary_size:
        raise ValueError(f"answers begin with token {model.decoder_start_token_id}, which is not in its vocabulary")
    sizes = (*footprint.bytes_per_token.values(), footprint.bytes_per_source_token)
    if len(footprint.bytes_per_token) > _MOST_PARTS or max(sizes) > _MOST_BYTES_PER_TOKEN:
        raise ValueError(
            f"a token takes an impossible {max(sizes)} bytes in {len(footprint.bytes_per_token)} parts of its cache"
        )
