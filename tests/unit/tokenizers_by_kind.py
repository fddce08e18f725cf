"""Small tokenizers of every kind that models have, trained when a test needs them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as HuggingFaceTokenizer

from specd.settings import EMBEDDED_T5_TARGET, EMBEDDED_TARGET
from specd.text.tokenizer import Tokenizer

_SENTENCES = ["The cat sat on the mat, and the dog sat there.", "def add(a, b):\n    return a + b", "Grüße an Zoë"] * 5
_METASPACE = "\N{LOWER ONE EIGHTH BLOCK}"
# The flags that tokens of real models have: they take the space around them, or are looked for in normalized text.
CONTROL = (
    AddedToken("</s>", special=True, normalized=False),
    AddedToken("<|left|>", special=True, normalized=False, lstrip=True),
    AddedToken("<|right|>", special=True, normalized=False, rstrip=True),
    AddedToken("<|word|>", special=True, normalized=False, single_word=True),
    AddedToken("<|call|>", special=True, normalized=False),
    AddedToken("<tool>", special=False, normalized=False),
)


def _file(directory: str) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer.from_file(str(Path(directory) / "tokenizer.json"))


def _sentencepiece_bpe(normalizer: Any, pre_tokenizer: Any) -> HuggingFaceTokenizer:
    """Return one in the form of Llama 2: BPE, spaces as blocks, and bytes where a character is unknown."""
    trained = HuggingFaceTokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    special = ["<unk>", "<s>", "</s>"]
    trained.train_from_iterator(_SENTENCES, trainers.BpeTrainer(vocab_size=150, special_tokens=special))
    model = json.loads(trained.to_str())["model"]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    # Sentencepiece's merges may lead to the text of a special token.
    tokens += [piece for piece in ("</", "s>", _METASPACE) if piece not in tokens]
    vocabulary = {token: token_id for token_id, token in enumerate(dict.fromkeys(tokens))}
    merges = [("<", "/"), ("s", ">"), ("</", "s>"), *map(tuple, model["merges"])]
    for character in "</s>":
        vocabulary.setdefault(character, len(vocabulary))
    tokenizer = HuggingFaceTokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_METASPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def _llama() -> HuggingFaceTokenizer:
    return _sentencepiece_bpe(None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False))


def _older_llama() -> HuggingFaceTokenizer:
    return _sentencepiece_bpe(
        normalizers.Sequence([normalizers.Prepend(_METASPACE), normalizers.Replace(" ", _METASPACE)]), None
    )


def _unigram() -> HuggingFaceTokenizer:
    tokenizer = HuggingFaceTokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = ["<unk>", "</s>"]
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=special, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    return tokenizer


def _word_piece() -> HuggingFaceTokenizer:
    tokenizer = HuggingFaceTokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(
        _SENTENCES, trainers.WordPieceTrainer(vocab_size=120, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    )
    tokenizer.add_special_tokens([AddedToken("<upper>", special=True, normalized=True)])
    return tokenizer


_KINDS = {
    "byte-level BPE": lambda: _file(EMBEDDED_TARGET),
    "BPE with byte fallback": _llama,
    "BPE with byte fallback, prepended": _older_llama,
    "unigram": _unigram,
    "unigram of a T5": lambda: _file(EMBEDDED_T5_TARGET),
    "WordPiece": _word_piece,
}
KINDS = tuple(_KINDS)


@cache
def raw_tokenizer(kind: str) -> HuggingFaceTokenizer:
    """Return the tokenizer of a kind, as its library has it."""
    tokenizer = _KINDS[kind]()
    tokenizer.add_tokens(list(CONTROL))
    return tokenizer


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    """Return the tokenizer of a kind, as specd has it."""
    return Tokenizer(raw_tokenizer(kind).to_str().encode())
