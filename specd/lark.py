"""Texts in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from specd.grammar import MAX_GRAMMAR_BYTES, Grammar, GrammarKind

_SLASH = re.compile(r"(?s:\\.)|/")  # or any escaped character
# White space between the tokens of JSON, as for schemas of their own: a weak model would write more of it for ever.
_WHITE_SPACE = r"\x20|\x0A{1,2}[\x20\x09]{0,40}"


def choice(alternatives: Iterable[str]) -> str:
    """Return the expression of one of the alternatives."""
    return f"({' | '.join(alternatives)})"


def pattern(text: str) -> str:
    """Return the regular expression of exactly this text, without the slashes around it."""
    return re.sub(r"[^\w\s<>=\"',:;@#%&`!~|｜▁]", lambda found: rf"\x{{{ord(found[0]):x}}}", text).replace("\n", r"\n")


def regex(written: str) -> str:
    """Return the terminal of a regular expression."""
    # A slash would end it, unless a backslash stands before it.
    escaped = _SLASH.sub(lambda found: found[0] if len(found[0]) > 1 else r"\/", written)
    return f"/{escaped}/"


def without(text: str) -> str:
    """Return the terminal of all that does not have this text in it."""
    return f"~/(?s:.)*{pattern(text)}(?s:.)*/"


class LarkGrammar:
    """Rules, as they are needed."""

    def __init__(self, special_tokens: Mapping[int, str]) -> None:
        """`special_tokens` are the model's: a text has them as tokens, never as characters."""
        self._ids = {token: token_id for token_id, token in special_tokens.items() if token}
        marks = sorted(self._ids, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, marks))) if marks else None
        self._names: dict[str, str] = {}  # of rules, by their options and bodies, or by the keys of `named`
        self._lines: dict[str, str] = {}  # by the names of the rules
        self._num_bytes = 0

    def is_special(self, text: str) -> bool:
        """Return whether a text is a special token."""
        return text in self._ids

    def any_special(self, *, but: str) -> str:
        """Return the expression of a special token other than this one, or "" if the model has no other."""
        ids = sorted(token_id for token, token_id in self._ids.items() if token != but)
        return f"<[{','.join(map(str, ids))}]>" if ids else ""

    def literal(self, text: str) -> str:
        """Return the expression of exactly this text."""
        pieces: list[str] = []
        at = 0
        for found in self._special.finditer(text) if self._special is not None else ():
            pieces += [_quoted(text[at : found.start()]), f"<[{self._ids[found[0]]}]>"]
            at = found.end()
        return " ".join(filter(None, (*pieces, _quoted(text[at:]))))

    def rule(self, body: str, *, prefix: str = "r", options: str = "") -> str:
        """Return the name of the rule with this body, which is added unless there is one. Raises ValueError."""
        return self.named(f"{prefix}{options}: {body}", lambda: body, prefix=prefix, options=options)

    def named(self, key: str, body: Callable[[], str], *, prefix: str = "r", options: str = "") -> str:
        """Return the name of the rule of this key, and its body can refer to the key.

        Raises ValueError if the grammar is too large.
        """
        if key not in self._names:
            self._names[key] = name = f"{prefix}{len(self._names)}"
            self._lines[name] = f"{name}{options}: {body()}"
            self._num_bytes += len(self._lines[name])
            if self._num_bytes > MAX_GRAMMAR_BYTES:
                raise ValueError(
                    f"the reply's grammar has more than {MAX_GRAMMAR_BYTES} bytes: send smaller schemas or fewer tools"
                )
        return self._names[key]

    def json(self, schema: Mapping[str, Any] | bool, *, lenient: bool) -> str:
        """Return the expression of JSON that keeps a schema; `lenient` leaves out what cannot be enforced."""
        options = {"whitespace_pattern": _WHITE_SPACE, "lenient": lenient}
        whole = schema if isinstance(schema, Mapping) else {} if schema else {"not": {}}
        return self.rule("%json " + json.dumps({**whole, "x-guidance": options}, ensure_ascii=True))

    def form(self, grammar: Grammar) -> str:
        """Return the expression of a text that keeps a grammar. Raises ValueError for a JSON schema that is no JSON."""
        match grammar.kind:
            case GrammarKind.JSON_SCHEMA:
                return self.json(json.loads(grammar.text), lenient=False)
            case GrammarKind.JSON_OBJECT:
                return self.json({"type": "object"}, lenient=False)
            case GrammarKind.REGEX:
                return self.rule(regex(grammar.text), prefix="T")
            case GrammarKind.LARK:
                return self.rule(f"%lark {{\n{grammar.text}\n}}")

    def text_to(self, end: str, *patterns: str) -> str:
        """Return the expression of any text up to `end`, and that; the text matches all the patterns.

        If `end` has special tokens, the patterns are of the text up to the first of them.
        """
        mark = end.strip()
        kept = [regex(each) for each in patterns]
        if self._special is not None and (found := self._special.search(mark)) is not None:
            # A token ends the text, which would have a line break before it as well.
            at = found.start()
            body = " & ".join([f"/(?s:.)*{pattern(mark[:at])}/", *kept])
            return f"{self._terminal(body)} {self.literal(mark[at:] + end[len(end.rstrip()) :])}"
        body = " & ".join(["/(?s:.)*/", without(mark), *kept])
        return self.rule(self._terminal(body), options=f"[suffix={_quoted(end)}]")

    def written(self, start: str) -> str:
        """Return the grammar as text; it begins with this expression."""
        return "\n".join([f"start: {start}", *self._lines.values()]) + "\n"

    def _terminal(self, body: str) -> str:
        return self.rule(body, prefix="T")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=True) if text else ""
