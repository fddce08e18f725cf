"""The tokens of clients: a file with one line a token, which has only the token's digest.

A token is 256 random bits, so its SHA-256 is enough: a slow hash protects secrets that can be guessed.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import structlog
from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from specd.caller import Caller, CallerLimits, check_name, is_name
from specd.errors import StartupError, UnauthenticatedError
from specd.identity.file_state import state_of
from specd.wrong_value import requirement

log = structlog.get_logger()

_PREFIX = "specd_"  # people and programs that look for leaked secrets recognise a token by it
_RANDOM_BYTES = 32
_MOST_CHARACTERS = 256

_Limit = Annotated[int | None, Field(ge=1)]


def _checked(name: str) -> str:
    if not is_name(name):
        raise ValueError("this is not a valid name for a client")
    return name


class Token(BaseModel):
    """One line of the file: a client's name, the SHA-256 of its token, its limits, and when it expires."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: Annotated[str, AfterValidator(_checked)]
    sha256: Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]
    sessions: _Limit = None
    tokens_per_minute: _Limit = None
    max_tokens: _Limit = None
    expires: AwareDatetime | None = None

    @property
    def id(self) -> str:
        """A short name for one of several tokens of a client."""
        return self.sha256[:8]

    @property
    def caller(self) -> Caller:
        """The client, as the services see it."""
        limits = CallerLimits(self.sessions, self.tokens_per_minute, self.max_tokens)
        return Caller(self.name, limits)

    def is_expired(self, now: float) -> bool:
        """Return whether the token is no longer valid at a Unix time."""
        return self.expires is not None and now >= self.expires.timestamp()


class TokenFile:
    """The tokens that a process accepts. The file is read again when it changes.

    If it cannot be read then, the tokens stay as they were, and the log has the reason.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        """Read the file. Raises StartupError."""
        self._path, self._clock = path, clock
        self._state = state_of(path)
        self._tokens = read_tokens(path)
        if not self._tokens:
            log.warning("no client has a token, so none can call: specd token new makes one", tokens=str(path))

    def identify(self, authorization: Sequence[str]) -> Caller:
        """Return the owner of the token in a call's `authorization` metadata. Raises UnauthenticatedError.

        Each call checks whether the file has changed, so the next call with a revoked token fails. A running
        generation continues, up to its `max_tokens`.
        """
        self._refresh()
        scheme, _, given = authorization[0].partition(" ") if len(authorization) == 1 else ("", "", "")
        if scheme.lower() != "bearer" or not given:
            raise UnauthenticatedError(
                "TOKEN_MISSING",
                "this coordinator needs a token: send one, as the metadata 'authorization: Bearer TOKEN' "
                "(specd generate reads it from SPECD_TOKEN)",
            )
        token = find(self._tokens, given.strip())
        if token is None:
            raise UnauthenticatedError(
                "TOKEN_UNKNOWN", "the token is unknown or has been revoked: ask the operator for a new one"
            )
        if token.is_expired(self._clock()):
            raise UnauthenticatedError(
                "TOKEN_EXPIRED", f"the token of {token.name} expired at {token.expires}: ask the operator for a new one"
            )
        return token.caller

    def _refresh(self) -> None:
        state = state_of(self._path)
        if state == self._state:
            return
        self._state = state
        try:
            self._tokens = read_tokens(self._path)
        except StartupError as error:
            log.error("kept the old tokens: the new file cannot be used", error=str(error))
        else:
            log.info("read the tokens again", tokens=str(self._path), count=len(self._tokens))


def find(tokens: Iterable[Token], given: str) -> Token | None:
    """Return the token with this text. All digests are compared in constant time, so that timing reveals none."""
    digest = hashlib.sha256(given[:_MOST_CHARACTERS].encode()).hexdigest()
    found = None
    for token in tokens:
        if hmac.compare_digest(token.sha256, digest):
            found = token
    return found if len(given) <= _MOST_CHARACTERS else None


def new_token(
    name: str,
    *,
    sessions: int | None = None,
    tokens_per_minute: int | None = None,
    max_tokens: int | None = None,
    expires: datetime | None = None,
) -> tuple[str, Token]:
    """Return a new token's text, and its line in the file. Raises StartupError for an invalid name."""
    check_name(name)
    text = _PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)
    return text, Token(
        name=name,
        sha256=hashlib.sha256(text.encode()).hexdigest(),
        sessions=sessions,
        tokens_per_minute=tokens_per_minute,
        max_tokens=max_tokens,
        expires=expires.astimezone(UTC) if expires is not None else None,
    )


def read_tokens(path: Path) -> list[Token]:
    """Return the tokens of a file. Raises StartupError, which names the invalid line."""
    try:
        text = path.read_text()
    except FileNotFoundError as error:
        raise StartupError(f"there is no token file {path}: 'specd token new NAME --tokens {path}' makes it") from error
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"cannot read the token file {path}: {error}") from error
    tokens = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            tokens.append(Token.model_validate_json(line))
        except ValidationError as error:
            raise StartupError(
                f"line {number} of the token file {path} is invalid: {_problems(error)}; remove the line, and make a "
                f"token with 'specd token new NAME --tokens {path}', which writes it"
            ) from error
    return tokens


def write_tokens(path: Path, tokens: Iterable[Token]) -> None:
    """Replace a file atomically, so that readers see the old file or the new one. Raises StartupError."""
    lines = [json.dumps(token.model_dump(mode="json", exclude_none=True)) + "\n" for token in tokens]
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.writelines(lines)
            if path.exists():  # keep the permissions
                before = path.stat()
                os.fchmod(file.fileno(), stat.S_IMODE(before.st_mode))
                with contextlib.suppress(PermissionError):
                    os.fchown(file.fileno(), before.st_uid, before.st_gid)
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise StartupError(f"cannot write the token file {path}: {error.strerror}") from error


def _problems(error: ValidationError) -> str:
    """Describe the problems without the values, because a digest or a token must not reach a log."""
    named = ((".".join(map(str, each["loc"])), requirement(each)) for each in error.errors())
    return "; ".join(f"{name}: {what}" if name else what for name, what in named)
