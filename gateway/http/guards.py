"""Access to the gateway: for this machine's own pages, and for programs, which send no Origin."""

from __future__ import annotations

import ipaddress
import re
import uuid
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.http.connection import ROLES
from gateway.http.error_forms import is_anthropics
from gateway.http.errors import ApiError
from gateway.http.responses import send_error
from specd.identity.roles import MAY_READ_METRICS, Role

_REQUEST_ID = re.compile(r"[\w.-]{1,128}", re.ASCII)


class Guards:
    """Checks Host, Origin and the certificate behind each request, and names it in `x-request-id`.

    A page of another site can make a browser send requests here. Its own name can resolve to this address (DNS
    rebinding): the Host is then that name, and never an address. So a Host must be an address, `localhost`, or one of
    `hosts`; over TLS the browser compares it with the certificate. An Origin must be that of the Host itself, or one of
    `origins`.

    With `asks_for_certificates`, a request needs a role for its path, except for `open_paths`.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        hosts: Collection[str],
        origins: Collection[str],
        asks_for_certificates: bool,
        open_paths: Collection[str],
    ) -> None:
        self._app = app
        self._asks_for_certificates = asks_for_certificates
        self._open_paths = frozenset(open_paths)
        self._hosts = {host.lower() for host in hosts}
        self._origins = set(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = Headers(scope=scope)
        given = asked.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope["request_id"] = request_id

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                if is_anthropics(scope):
                    headers["request-id"] = request_id
            await send(message)

        refusal = self._refusal(asked, is_secure=scope.get("scheme") == "https")
        if refusal := refusal or self._refusal_of_role(scope.get(ROLES, frozenset()), scope["path"]):
            await send_error(refusal, scope, send_named)
        else:
            await self._app(scope, receive, send_named)

    def _refusal(self, headers: Headers, *, is_secure: bool) -> ApiError | None:
        if "transfer-encoding" in headers and "content-length" in headers:
            # A proxy in front may read the other header, and miss a second request in the rest of the body.
            both = "the request has a content-length and a transfer-encoding: send one of them"
            return ApiError(400, "ambiguous_length", both, headers={"connection": "close"})
        hosts = headers.getlist("host")
        host = hosts[0] if len(hosts) == 1 else ""
        name = _name_of(host)
        if not (self._is_ours(name) or (is_secure and name)):
            return ApiError(
                403,
                "host_not_allowed",
                f"the Host is {host[:100]!r}, which is not a name of this gateway: use its address, or start it with "
                "--allowed-hosts",
            )
        origin = headers.get("origin")
        if origin is not None and origin not in self._origins and origin.partition("://")[2] != host:
            return ApiError(
                403,
                "origin_not_allowed",
                f"pages of {origin[:100]!r} may not call this gateway: start it with --cors-origins to allow them",
            )
        return None

    def _is_ours(self, name: str) -> bool:
        if name == "localhost" or name in self._hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _refusal_of_role(self, roles: frozenset[Role], path: str) -> ApiError | None:
        allowed = MAY_READ_METRICS if path == "/metrics" else {Role.CLIENT}
        if not self._asks_for_certificates or path in self._open_paths or roles & allowed:
            return None
        roles_needed = " or ".join(sorted(allowed))
        return ApiError(403, "role_denied", f"this needs a certificate with the role {roles_needed}: use one")


def _name_of(host: str) -> str:
    """Return a Host without its port, and without the brackets of IPv6; "" if it is invalid."""
    match = re.fullmatch(r"(?:\[([0-9a-f:.]+)\]|([\w.-]+))(?::[0-9]{1,5})?", host.lower(), re.ASCII)
    return (match[1] or match[2]) if match else ""
