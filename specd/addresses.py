"""Addresses in settings: HOST:PORT, unix:PATH, and URLs of endpoints."""

from __future__ import annotations

import re
from ipaddress import ip_address

NAME_PREFIX = "dns:"  # of a name that stands for all its addresses, as in gRPC

_MOST_PORT = 2**16 - 1


def check_address(address: str, *, form: str = "HOST:PORT or unix:PATH", least_port: int = 0) -> str:
    """Return an address of gRPC. Raises ValueError for anything else."""
    if address.startswith("unix:") and len(address) > len("unix:"):
        return address
    host, colon, port = address.rpartition(":")
    is_host = ":" not in host or re.fullmatch(r"\[[0-9A-Fa-f:.]+(%.+)?\]|[a-z][a-z0-9+.-]*:.*", host)
    if not (colon and host and is_host and re.fullmatch("[0-9]+", port)) or re.match("[a-z]+://[^/]", address):
        brackets = "" if is_host else ", an IPv6 address in brackets"
        raise ValueError(f"{address!r} is not an address: write {form}{brackets}")
    if len(port) > len(str(_MOST_PORT)) or not least_port <= int(port) <= _MOST_PORT:
        raise ValueError(f"{address!r} has the port {port}: it must be {least_port} to {_MOST_PORT}")
    return address


def split_addresses(addresses: str) -> tuple[str, ...]:
    """Return the addresses in a list with commas."""
    return tuple(address.strip() for address in addresses.split(","))


def check_addresses(addresses: str) -> str:
    """Return a list of addresses of gRPC with commas, or with names (dns:HOST:PORT). Raises ValueError for others."""
    each = split_addresses(addresses)
    for address in each:
        if not re.fullmatch(r"dns:(///)?([A-Za-z0-9_-]{1,63}\.)*[A-Za-z0-9_-]{1,63}\.?:[0-9]{1,5}", address):
            check_address(address, form="HOST:PORT, unix:PATH or dns:HOST:PORT")
        if address.startswith(NAME_PREFIX):
            check_address(address.removeprefix(NAME_PREFIX).lstrip("/"), form="dns:HOST:PORT", least_port=1)
    if len(set(each)) < len(each):
        raise ValueError(f"{addresses!r} names an address twice: write each one once")
    return ",".join(each)


def check_optional_addresses(addresses: str) -> str:
    """Return a list of addresses of gRPC, or "" for none. Raises ValueError for anything else."""
    return "" if addresses in {"", "none"} else check_addresses(addresses)


def check_host_and_port(address: str, *, least_port: int = 0) -> str:
    """Return HOST:PORT. Raises ValueError for anything else."""
    if address.startswith("unix:"):
        raise ValueError(f"{address!r} is not a TCP address: write HOST:PORT")
    return check_address(address, form="HOST:PORT", least_port=least_port)


def check_tcp_address(address: str) -> str:
    """Return HOST:PORT, or "" for none. Raises ValueError for anything else."""
    return "" if address in {"", "none"} else check_host_and_port(address)


def is_local(address: str) -> bool:
    """Return whether an address, HOST:PORT or unix:PATH, cannot be reached from other machines.

    Names of hosts other than `localhost` count as reachable, because a name can lead anywhere.
    """
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def from_here(address: str) -> str:
    """Return the address by which this machine reaches a listener; a wildcard address becomes the loopback address."""
    host, _, port = address.rpartition(":")
    return {"0.0.0.0": f"127.0.0.1:{port}", "[::]": f"[::1]:{port}"}.get(host, address)


def check_endpoint(url: str) -> str:
    """Return the URL of an OTLP endpoint, or "" for none. Raises ValueError for anything else."""
    if url in {"", "none"}:
        return ""
    if not re.fullmatch("https?://[^/ ]+/?", url):
        raise ValueError(f"{url!r} is not an OTLP endpoint for gRPC: write http://HOST:PORT or https://HOST:PORT")
    return url


def check_session_server(url: str) -> str:
    """Return the URL of a Valkey or Redis server, or "" for none. Raises ValueError, without the URL's password."""
    if url in {"", "none"}:
        return ""
    if not re.fullmatch(r"rediss?://([^@/ ]*@)?[^@/: ]+(:[0-9]{1,5})?(/[0-9]{1,4})?", url):
        shown = re.sub("//[^@]*@", "//…@", url)
        raise ValueError(f"{shown!r} is not the URL of a Valkey or Redis server: write redis://HOST:PORT or rediss://…")
    return url
