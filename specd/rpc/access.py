"""The caller of the running call, and the calls that each caller may make."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, TypeAlias

import grpc

from specd.caller import Caller
from specd.errors import PermissionDeniedError
from specd.identity.certificates import Certificates
from specd.identity.peer import Peer, peer_of
from specd.identity.roles import Role
from specd.identity.tokens import TokenFile

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
# Returns who makes a call of this method. Raises UnauthenticatedError or PermissionDeniedError.
Identify: TypeAlias = Callable[[str, _Context], Caller]

ANYBODY = frozenset(Role)
CLIENT, COORDINATOR = frozenset({Role.CLIENT}), frozenset({Role.COORDINATOR})
CLIENT_OR_GATEWAY = CLIENT | {Role.GATEWAY}

# The roles that may call each method of each process, where callers have certificates. Where they have tokens, every
# caller with a token is a client. A method for ANYBODY needs no token, and a certificate of any role or none, because
# load balancers and containers ask for health. A method that is not in the table is denied.
_HEALTH = {f"/grpc.health.v1.Health/{method}": ANYBODY for method in ("Check", "List", "Watch")}
_REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
_WORKER = {
    "/specd.v1.ModelService/Describe": COORDINATOR,
    "/specd.v1.ModelService/GetTokenizer": COORDINATOR,
    "/specd.v1.MultiplexService/Multiplex": COORDINATOR,
    _REFLECTION: COORDINATOR,
    **_HEALTH,
}
MAY_CALL: Mapping[Role, Mapping[str, frozenset[Role]]] = {
    Role.COORDINATOR: {
        "/specd.v1.GenerationService/Generate": CLIENT_OR_GATEWAY,
        "/specd.v1.GenerationService/CountTokens": CLIENT_OR_GATEWAY,
        "/specd.v1.GenerationService/Detokenize": CLIENT_OR_GATEWAY,
        "/specd.v1.GenerationService/GetModelInfo": CLIENT_OR_GATEWAY,
        "/specd.v1.GenerationService/ListModels": CLIENT_OR_GATEWAY,
        "/specd.v1.SessionService/ListSessions": CLIENT,
        "/specd.v1.SessionService/GetSession": CLIENT,
        "/specd.v1.SessionService/DeleteSession": CLIENT,
        _REFLECTION: CLIENT,
        **_HEALTH,
    },
    Role.DRAFT_WORKER: {"/specd.v1.DraftService/Propose": COORDINATOR, **_WORKER},
    Role.TARGET_WORKER: {"/specd.v1.TargetService/Verify": COORDINATOR, **_WORKER},
}

_ANYONE = Caller("")
_caller: ContextVar[Caller] = ContextVar("caller")


def current_caller() -> Caller:
    """Return who makes the call that this task serves. Raises LookupError outside of calls."""
    return _caller.get()


def serve_caller(caller: Caller) -> None:
    """Set the caller of the call that this task serves. gRPC serves each call in a task of its own."""
    _caller.set(caller)


def anyone(method: str, context: _Context) -> Caller:
    """Let everyone call everything, as the client without a name."""
    return _ANYONE


def by_token(process: Role, tokens: TokenFile) -> Identify:
    """Return an `Identify` that admits callers whose token is in the file."""
    table = MAY_CALL[process]

    def identify(method: str, context: _Context) -> Caller:
        if table.get(method) is ANYBODY:
            return _ANYONE
        metadata = context.invocation_metadata() or ()
        caller = tokens.identify([str(value) for key, value in metadata if key == "authorization"])
        if Role.CLIENT not in table.get(method, ()):
            raise PermissionDeniedError("ROLE_DENIED", f"no client may call {method}")
        return caller

    return identify


def by_certificate(process: Role) -> Identify:
    """Return an `Identify` that admits callers whose certificate has a role that may call the method.

    TLS has verified the certificates. A client is known by the common name of its certificate: one without a single
    name is refused, because two of them would be one client.
    """
    table = MAY_CALL[process]

    def identify(method: str, context: _Context) -> Caller:
        allowed = table.get(method, frozenset())
        if allowed is ANYBODY:
            return _ANYONE
        shown = [*context.auth_context().get("x509_pem_cert", ())]
        peer = peer_of(shown[0]) if len(shown) == 1 else Peer()
        roles = peer.roles & allowed
        if not roles:
            raise PermissionDeniedError(
                "ROLE_DENIED",
                f"{method} of a {process} is for the certificate of {_listed(allowed)}, and yours is of "
                f"{_listed(peer.roles)}",
            )
        if not roles & CLIENT_OR_GATEWAY:
            return Caller(min(roles))
        try:
            return Caller(peer.name)
        except ValueError as error:
            raise PermissionDeniedError(
                "ROLE_DENIED",
                f"a client is known by the one common name of its certificate, and {error}: use a certificate whose "
                "subject has a CN of the client's own",
            ) from error

    return identify


class Guard:
    """Access control of one process's gRPC port.

    Clients show a token where there are `tokens`. Otherwise, callers show a certificate where there is an authority to
    verify it. It is one or the other, because gRPC for Python either requires a client's certificate or does not ask
    for one. Unix sockets have no TLS: every user who may open the file may connect.
    """

    def __init__(
        self,
        process: Role,
        *,
        listen: str,
        certificates: Certificates | None = None,
        tokens: TokenFile | None = None,
    ) -> None:
        """Guard the port of a process at an address; without certificates and tokens, admit everyone."""
        self.certificates = None if listen.startswith("unix:") else certificates
        self.wants_certificate = self.certificates is not None and self.certificates.has_ca and tokens is None
        self.identify: Identify = anyone
        if tokens is not None:
            self.identify = by_token(process, tokens)
        elif self.wants_certificate:
            self.identify = by_certificate(process)


def _listed(roles: frozenset[Role]) -> str:
    return " or ".join(f"a {role}" for role in sorted(roles)) or "no role"
