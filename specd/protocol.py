"""The version of the protocol between specd's processes, and the check that two of them speak the same one."""

from __future__ import annotations

from collections.abc import Iterable

import grpc

from specd.errors import SpecdError
from specd.version import __version__

# Raise it with each change of the protocol that an older process would misunderstand. Another field is such a change
# only if it changes the text, as a sampling parameter does: an older worker would ignore it.
PROTOCOL = 1
# The metadata with which specd's own clients name theirs. Other clients need not: they know the messages by themselves.
PROTOCOL_METADATA = "specd-protocol"
_LONGEST = 40  # characters of a peer's version in an error


class ProtocolMismatchError(SpecdError):
    """Two processes of specd speak different protocols."""

    code = grpc.StatusCode.FAILED_PRECONDITION

    def __init__(self, message: str) -> None:
        super().__init__("PROTOCOL_MISMATCH", message)


def check_protocol_of(peer: str, version: str, protocol: int) -> None:
    """Raise ProtocolMismatchError unless a process that describes itself speaks this protocol.

    `version` is its version of specd, and `protocol` 0 for versions from before protocols had numbers.
    """
    if protocol != PROTOCOL:
        theirs = f"protocol {protocol}" if protocol else "a protocol without a number"
        shown = version[:_LONGEST] if version.isprintable() else ""
        raise ProtocolMismatchError(
            f"{peer} is specd {shown or 'of an older version'} and speaks {theirs}, and this process is specd "
            f"{__version__} and speaks protocol {PROTOCOL}: install the same version of specd for both"
        )


def check_protocol_in(metadata: Iterable[tuple[str, str | bytes]]) -> None:
    """Raise ProtocolMismatchError if a caller names another protocol in the metadata of its call."""
    for name, value in metadata:
        if name == PROTOCOL_METADATA and value != str(PROTOCOL):
            shown = str(value)[:_LONGEST]
            raise ProtocolMismatchError(
                f"the caller speaks protocol {shown}, and this process is specd {__version__} and speaks protocol "
                f"{PROTOCOL}: install the same version of specd for both"
            )
