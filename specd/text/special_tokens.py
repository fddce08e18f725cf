"""The special tokens of a tokenizer: their places in a text, and secret names for them."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer as HuggingFaceTokenizer

# A character without a meaning, which no template changes.
MARK = "\ue0ff"

_Trie = dict[str, Any]


def pattern_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches the longest of the texts.

    It is a trie, so that the time of a search depends on the length of its input, and not on the number of texts.
    """
    trie: _Trie = {}
    for text in texts:
        node = trie
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}  # a text ends here
    return re.compile(_expression(trie))


def _expression(node: _Trie) -> str:
    start = ""
    while len(node) == 1 and "" not in node:  # a chain, without a recursion for each of its characters
        ((character, node),) = node.items()
        start += re.escape(character)
    branches = [re.escape(character) + _expression(node[character]) for character in node if character]
    if not branches:
        return start
    return f"{start}(?:{'|'.join(branches)}){'?' if '' in node else ''}"


class SecretNames:
    """A tokenizer in which every special token has a secret name. Its usual name is text like any other.

    The names have the ids of the tokens, and their handling of space around them. So a text can have both special
    tokens, by their secret names, and their look-alikes. Only `encode` may see a secret name.
    """

    def __init__(self, tokenizer: HuggingFaceTokenizer) -> None:
        data = json.loads(tokenizer.to_str())
        special = [token for token in data["added_tokens"] if token["special"]]
        secret = secrets.token_hex(16)
        self._names = {token["content"]: f"{MARK}{secret}{token['id']:08}{MARK}" for token in special}
        self._special = {token["id"]: token["content"] for token in special}
        self._plain = tokenizer
        for token in special:
            # Whether a token is a word of its own is decided when its name is written.
            token.update(content=self._names[token["content"]], special=False, single_word=False)
        self._rename(data["model"])
        self._named = HuggingFaceTokenizer.from_str(json.dumps(data))
        for token in special:
            assert self._named.token_to_id(token["content"]) == token["id"]

    def written_in(self, text: str) -> str:
        """Return the text with secret names where the tokenizer itself finds special tokens."""
        (encoding,) = self._plain.encode_batch([text], add_special_tokens=False)
        parts, end = [], 0
        for token_id, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
            content = self._special.get(token_id)
            # The unknown token stands for other texts too.
            if content is not None and content in (found := text[start:stop]):
                parts += [text[end:start], found.replace(content, self._names[content])]
                end = stop
        return "".join([*parts, text[end:]])

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text with secret names."""
        (encoding,) = self._named.encode_batch_fast([text], add_special_tokens=False)
        return list(encoding.ids)

    def _rename(self, model: dict[str, Any]) -> None:
        """Rename the tokens in a model, or it would find some as pieces of a text."""
        names, vocabulary = self._names, model.get("vocab", {})
        if isinstance(vocabulary, dict):
            model["vocab"] = {names.get(token, token): token_id for token, token_id in vocabulary.items()}
        else:  # Unigram has pairs with a score
            model["vocab"] = [[names.get(token, token), score] for token, score in vocabulary]
        if (unknown := model.get("unk_token")) is not None:
            model["unk_token"] = names.get(unknown, unknown)
        if merges := model.get("merges"):
            pairs = [merge if isinstance(merge, list) else merge.split(" ") for merge in merges]
            model["merges"] = [pair for pair in pairs if not {*pair, "".join(pair)} & names.keys()]
