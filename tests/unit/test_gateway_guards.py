"""Host and Origin of HTTP requests."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.http.connection import ROLES
from gateway.http.guards import Guards
from specd.identity.roles import Role


async def status_of(
    *,
    hosts: tuple[str, ...] = (),
    origins: tuple[str, ...] = (),
    path: str = "/v1/models",
    roles: frozenset[Role] | None = None,
    asks_for_certificates: bool = False,
    **headers: str,
) -> tuple[int, str]:
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError

    raw = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    scope: dict[str, Any] = {"type": "http", "path": path, "headers": raw}
    if roles is not None:
        scope[ROLES] = roles
    guards = Guards(
        app,
        hosts=hosts,
        origins=origins,
        asks_for_certificates=asks_for_certificates,
        open_paths=("/health",),
    )
    await guards(scope, receive, send)
    return sent[0]["status"], dict(sent[0]["headers"])[b"x-request-id"].decode()


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8080", "127.0.0.1:8080", "[::1]:8080", "192.168.1.4", "LocalHost"]
)
async def test_addresses_and_localhost_are_ours(host: str) -> None:
    assert (await status_of(host=host))[0] == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8080",
        "",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "127.0.0.1:80@evil",
        "[::1",
        "a b",
    ],
)
async def test_other_names_are_not(host: str) -> None:
    assert (await status_of(host=host))[0] == 403


async def test_a_name_can_be_allowed() -> None:
    assert (await status_of(host="Gateway:8080", hosts=("gateway",)))[0] == 200


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://127.0.0.1:8080", 200),
        ("https://chat.example.org", 200),
        ("http://127.0.0.1:3000", 403),
        ("http://evil.example", 403),
        ("null", 403),
        ("", 403),
        ("http://chat.example.org", 403),
    ],
)
async def test_an_origin_is_ours_or_allowed(origin: str, status: int) -> None:
    allowed = ("https://chat.example.org",)
    assert (await status_of(host="127.0.0.1:8080", origin=origin, origins=allowed))[0] == status


async def test_requests_have_ids() -> None:
    assert (await status_of(host="localhost", x_request_id="mine-1"))[1] == "mine-1"
    for bad in ("", "x" * 129, "a b", "é"):
        given = (await status_of(host="localhost", x_request_id=bad))[1]
        assert len(given) == 32
        assert given != bad


@pytest.mark.parametrize(
    ("roles", "path", "status"),
    [
        (frozenset({Role.CLIENT}), "/v1/models", 200),
        (frozenset({Role.MONITORING}), "/v1/models", 403),
        (frozenset({Role.MONITORING}), "/metrics", 200),
        (frozenset({Role.CLIENT}), "/metrics", 403),
        (frozenset({Role.MONITORING}), "/health", 200),
        (frozenset(), "/health", 200),
        (frozenset(), "/v1/models", 403),
        (frozenset(), "/metrics", 403),
        (None, "/v1/models", 403),
        (None, "/metrics", 403),
        (None, "/health", 200),
    ],
)
async def test_a_path_is_for_its_roles_and_unknown_ones_are_refused(
    roles: frozenset[Role] | None, path: str, status: int
) -> None:
    assert (await status_of(host="localhost", path=path, roles=roles, asks_for_certificates=True))[0] == status
