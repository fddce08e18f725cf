"""Processes and clients of versions that do not speak the same protocol refuse one another."""

from __future__ import annotations

import pytest

from specd.client.protocol.service import described
from specd.protocol import (
    PROTOCOL,
    PROTOCOL_METADATA,
    ProtocolMismatchError,
    check_protocol_in,
    check_protocol_of,
)
from specd.v1 import generation_pb2
from specd.version import __version__

OTHER = PROTOCOL + 1


def test_the_words_name_both_versions_and_the_remedy() -> None:
    with pytest.raises(ProtocolMismatchError) as raised:
        check_protocol_of("the draft worker at h:1", "9.9.9", OTHER)
    assert str(raised.value) == (
        f"the draft worker at h:1 is specd 9.9.9 and speaks protocol {OTHER}, and this process is specd "
        f"{__version__} and speaks protocol {PROTOCOL}: install the same version of specd for both"
    )
    with pytest.raises(ProtocolMismatchError, match="is specd of an older version and speaks a protocol without a num"):
        check_protocol_of("the coordinator", "", 0)


def test_a_version_of_a_peer_cannot_write_into_a_terminal_or_fill_it() -> None:
    for version in ("\x1b[31m", "1\n2"):
        with pytest.raises(ProtocolMismatchError, match="specd of an older version"):
            check_protocol_of("the coordinator", version, 0)
    with pytest.raises(ProtocolMismatchError) as raised:
        check_protocol_of("the coordinator", "9" * 10_000, 0)
    assert len(str(raised.value)) < 300


def test_another_version_of_the_same_protocol_is_fine() -> None:
    check_protocol_of("the coordinator", "9.9.9", PROTOCOL)
    check_protocol_in([("user-agent", "x"), (PROTOCOL_METADATA, str(PROTOCOL))])
    check_protocol_in([("user-agent", "grpcurl")])


def test_a_client_refuses_the_description_of_another_protocol() -> None:
    with pytest.raises(ProtocolMismatchError, match=f"the coordinator is specd 9.9.9 and speaks protocol {OTHER}"):
        described(generation_pb2.GetModelInfoResponse(version="9.9.9", protocol=OTHER))
