"""Check 24: pages of other sites, names that lead here, paths in model ids, and requests in requests."""

from __future__ import annotations

import json

import pytest

from tests.security.http_door import HttpDoor

BODY = json.dumps({"prompt": "x"}).encode()


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8080", "localhost.evil.example", "127.0.0.1.nip.io", ""]
)
async def test_a_name_that_leads_here_is_refused(http_door: HttpDoor, host: str) -> None:
    """DNS rebinding: the page's own name resolves to this machine."""
    for path in ("/v1/models", "/metrics", "/openapi.json"):
        head = f"GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n"
        assert (await http_door.request(head.encode())).status in {400, 403}


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1", "file://"])
async def test_a_page_of_another_site_is_refused_and_told_nothing(http_door: HttpDoor, origin: str) -> None:
    for kind in ("application/json", "text/plain"):  # the latter without asking first
        answer = await http_door.post("/v1/completions", BODY, f"origin: {origin}", f"content-type: {kind}")
        assert answer.status == 403
        assert b"access-control-allow-origin" not in answer.headers
    preflight = http_door.head("OPTIONS", "/v1/completions", f"origin: {origin}", "access-control-request-method: POST")
    answer = await http_door.request(preflight)
    assert answer.status == 403
    assert b"access-control-" not in answer.headers


async def test_its_own_page_is_let_in(http_door: HttpDoor) -> None:
    answer = await http_door.post("/v1/completions", BODY, f"origin: http://{http_door.address}")
    assert answer.status == 503  # the coordinator is away


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
async def test_what_a_form_can_send_is_refused(http_door: HttpDoor, kind: str) -> None:
    assert (await http_door.post("/v1/completions", BODY, f"content-type: {kind}")).status == 415


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models/../../../../etc/passwd",
        "/v1/models/%2e%2e%2f%2e%2e%2fetc%2fpasswd",
        "/v1/models/http://169.254.169.254/latest/meta-data",
        "/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/static/../main.py",
    ],
)
async def test_paths_lead_to_no_file_and_no_address(http_door: HttpDoor, path: str) -> None:
    answer = await http_door.get(path)
    assert answer.status in {404, 503}
    assert b"root:" not in answer.body
    assert json.loads(answer.body)["error"]["message"]


@pytest.mark.parametrize(
    "headers",
    [
        "content-length: 5\r\ncontent-length: 6",
        "content-length: 5\r\ntransfer-encoding: chunked",
        "transfer-encoding: chunked, identity",
        "content-length: +5",
        "content-length: 5, 6",
        "content-length : 5",
        "x-a: b\r\n folded: c\r\ncontent-length : 5",
    ],
)
async def test_a_request_inside_a_request_is_not_served(http_door: HttpDoor, headers: str) -> None:
    """Requests that a proxy in front and the gateway could read differently."""
    inner = f"GET /health HTTP/1.1\r\nhost: {http_door.address}\r\n\r\n"
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {http_door.address}\r\n{headers}\r\n\r\n0\r\n\r\n{inner}"
    answer = await http_door.request(head.encode())
    assert answer.status == 400
    assert b"HTTP/1.1" not in answer.body  # no second answer


async def test_errors_name_no_address_and_no_version(http_door: HttpDoor) -> None:
    answer = await http_door.post("/v1/completions", BODY)
    assert answer.status == 503
    assert b"retry-after: " in answer.headers
    assert b"server:" not in answer.headers
    assert b"127.0.0.1" not in answer.body


async def test_a_header_of_the_client_cannot_split_the_answers(http_door: HttpDoor) -> None:
    body = json.dumps({"prompt": "x", "a\r\nset-cookie: b": 1, "x" * 10_000: 1, "ok": 1}).encode()
    answer = await http_door.post("/v1/completions", body, "x-request-id: a\tb")
    assert b"set-cookie" not in answer.headers
