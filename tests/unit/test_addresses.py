"""Addresses of processes."""

from __future__ import annotations

import socket

import pytest

from specd.addresses import check_address, from_here
from specd.listening import check_socket_path, listen
from specd.startup_error import StartupError


@pytest.mark.parametrize(
    ("address", "reached"),
    [
        ("0.0.0.0:50051", "127.0.0.1:50051"),
        ("[::]:50051", "[::1]:50051"),
        ("10.1.2.3:50051", "10.1.2.3:50051"),
        ("unix:/run/specd", "unix:/run/specd"),
    ],
)
def test_all_addresses_are_reached_by_loopback(address: str, reached: str) -> None:
    assert from_here(address) == reached


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(StartupError, match=f"cannot listen at {address}: .*; choose another address"):
            listen(address)


def test_a_socket_path_needs_a_directory() -> None:
    with pytest.raises(StartupError, match="there is no directory /nowhere"):
        check_socket_path("unix:/nowhere/socket")


@pytest.mark.parametrize("address", ["127.0.0.1:0", "[::1]:65535", "dns:///specd:50051", "unix:/run/specd"])
def test_an_address_of_grpc(address: str) -> None:
    assert check_address(address) == address


@pytest.mark.parametrize("address", ["127.0.0.1:65536", "[::1]:999999999999"])
def test_the_largest_port_is_named(address: str) -> None:
    with pytest.raises(ValueError, match="it must be 0 to 65535"):
        check_address(address)
