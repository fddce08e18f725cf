"""A recursive descent parser for arithmetic expressions.

The grammar is::

    expression := term (("+" | "-") term)*
    term       := factor (("*" | "/") factor)*
    factor     := ("+" | "-") factor | power
    power      := atom ("^" factor)?
    atom       := NUMBER | NAME | "(" expression ")"
"""

import re
from collections import namedtuple

Token = namedtuple("Token", ["kind", "text", "position"])

TOKEN_SPEC = [
    ("NUMBER", r"\d+(\.\d*)?"),
    ("NAME", r"[A-Za-z_]\w*"),
    ("OPERATOR", r"[-+*/^()]"),
    ("SPACE", r"\s+"),
    ("ERROR", r"."),
]
TOKEN_REGEX = re.compile(
    "|".join(f"(?P<{name}>{pattern})" for name, pattern in TOKEN_SPEC)
)


class ParseError(ValueError):
    """Raised when an expression is malformed."""

    def __init__(self, message, position):
        super().__init__(f"{message} at position {position}")
        self.position = position


def tokenize(text):
    """Split an expression into tokens.

    >>> [token.text for token in tokenize("2 * (x + 1)")]
    ['2', '*', '(', 'x', '+', '1', ')', '']
    """
    for match in TOKEN_REGEX.finditer(text):
        kind = match.lastgroup
        if kind == "SPACE":
            continue
        if kind == "ERROR":
            raise ParseError(f"unexpected character {match.group()!r}", match.start())
        yield Token(kind, match.group(), match.start())
    yield Token("END", "", len(text))


class Parser:
    """Evaluate an expression while parsing it."""

    def __init__(self, text, variables=None):
        self.tokens = list(tokenize(text))
        self.index = 0
        self.variables = dict(variables or {})

    @property
    def current(self):
        return self.tokens[self.index]

    def advance(self):
        """Return the current token and move on to the next one."""
        token = self.current
        self.index += 1
        return token

    def accept(self, *texts):
        """Consume the current token if its text is one of those given."""
        if self.current.kind == "OPERATOR" and self.current.text in texts:
            return self.advance()
        return None

    def expect(self, text):
        """Consume the current token, which must have the given text."""
        token = self.accept(text)
        if token is None:
            raise ParseError(f"expected {text!r}", self.current.position)
        return token

    def parse(self):
        """Evaluate the whole input."""
        value = self.expression()
        if self.current.kind != "END":
            raise ParseError("unexpected trailing input", self.current.position)
        return value

    def expression(self):
        value = self.term()
        while True:
            if self.accept("+"):
                value += self.term()
            elif self.accept("-"):
                value -= self.term()
            else:
                return value

    def term(self):
        value = self.factor()
        while True:
            if self.accept("*"):