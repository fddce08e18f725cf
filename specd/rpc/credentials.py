"""Credentials of connections, for servers and for clients."""

from __future__ import annotations

import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from specd.addresses import is_local
from specd.errors import StartupError
from specd.identity.certificates import CertificateFiles, Certificates, not_pem


@dataclass(frozen=True)
class ClientCredentials:
    """The authority that a client trusts, and the certificate and token that it presents.

    With `ca`, a file of the authorities to trust, the connection uses TLS, without it plaintext. `cert` and `key` are
    the client's own certificate. The server's certificate must be for `server_name`, by default the host of its
    address. Every call has the `token`; over plaintext it is sent to this machine only, unless `insecure`. Errors name
    the options by their `option_prefix`.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    token: str = ""
    server_name: str = ""
    insecure: bool = False
    option_prefix: str = "--tls"

    def for_channel(self, address: str) -> grpc.ChannelCredentials | None:
        """Return the credentials of a channel, or None for plaintext. Raises StartupError if they cannot be used."""
        if (self.cert is None) != (self.key is None):
            raise StartupError(
                "a client's certificate and its key go together: "
                f"set both {self.option_prefix}-cert and {self.option_prefix}-key"
            )
        if self.ca is None and self.cert is not None:
            raise StartupError(
                f"a client's certificate needs TLS: also set {self.option_prefix}-ca to the authority of the server"
            )
        if self.token and not re.fullmatch("[!-~]+", self.token):
            raise StartupError("the token has characters that tokens cannot have: copy it again")
        if address.startswith("unix:") or self.ca is None:
            if self.token and not (self.insecure or is_local(address)):
                raise StartupError(
                    f"the token would go to {address} in plaintext, which others on the network can read: set "
                    f"{self.option_prefix}-ca to the authority of the server, or --insecure if something else "
                    "keeps the connection secret"
                )
            return None
        client_context(self.ca, self.cert, self.key)  # gRPC itself would say only that it cannot connect
        ca, cert, key = (_content(path) for path in (self.ca, self.cert, self.key))
        return grpc.ssl_channel_credentials(ca, key, cert)

    @property
    def options(self) -> list[tuple[str, Any]]:
        """Options of the channel."""
        return [("grpc.ssl_target_name_override", self.server_name)] if self.server_name else []

    @property
    def interceptors(self) -> Sequence[grpc.aio.ClientInterceptor]:
        """The interceptors that add the token to calls."""
        return [kind(self.token) for kind in (_UnaryUnary, _UnaryStream, _StreamStream)] if self.token else []

    @property
    def metadata(self) -> list[tuple[str, str]]:
        """The token as metadata of a call."""
        return [("authorization", f"Bearer {self.token}")] if self.token else []


PLAIN = ClientCredentials()


def client_context(ca: Path, cert: Path | None, key: Path | None) -> ssl.SSLContext:
    """Return Python's own TLS for a client. Raises StartupError, which names the file that cannot be used."""
    try:
        context = ssl.create_default_context(cafile=ca)
    except ssl.SSLError as error:
        raise not_pem(ca) from error
    except OSError as error:
        raise StartupError(f"cannot read {ca}: {error.strerror}") from error
    if cert is None:
        return context
    try:
        context.load_cert_chain(cert, key, password=lambda: "")  # OpenSSL would ask for one on the terminal
    except (OSError, ValueError) as error:
        Certificates(CertificateFiles(cert, key or cert), role=None)  # its error is more precise
        raise StartupError(f"the certificate {cert} and its key cannot be used: {error}") from error
    return context


def server_credentials(certificates: Certificates, *, wants_certificate: bool) -> grpc.ServerCredentials:
    """Return the credentials of a port. Each new connection gets the current content of the files."""
    given = certificates.generation

    def configuration() -> grpc.ServerCertificateConfiguration:
        pems = certificates.pems
        return grpc.ssl_server_certificate_configuration(
            [(pems.key, pems.cert)], root_certificates=pems.ca if wants_certificate else None
        )

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal given
        certificates.refresh()
        if certificates.generation == given:
            return None  # gRPC keeps the earlier configuration
        given = certificates.generation
        return configuration()

    return grpc.dynamic_ssl_server_credentials(
        configuration(),
        fetch,  # type: ignore[arg-type]  # None is not in the stubs
        require_client_authentication=wants_certificate,
    )


@dataclass(frozen=True)
class _WithToken:
    """Adds a token to the metadata of a call."""

    token: str

    def _signed(self, details: Any) -> Any:
        metadata = grpc.aio.Metadata(*(details.metadata or ()), ("authorization", f"Bearer {self.token}"))
        return details._replace(metadata=metadata)


# grpc.aio accepts an interceptor for one kind of call only.
class _UnaryUnary(_WithToken, grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await continuation(self._signed(client_call_details), request)


class _UnaryStream(_WithToken, grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await continuation(self._signed(client_call_details), request)


class _StreamStream(_WithToken, grpc.aio.StreamStreamClientInterceptor):
    async def intercept_stream_stream(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return await continuation(self._signed(client_call_details), request_iterator)


def _content(path: Path | None) -> bytes | None:
    try:
        return path.read_bytes() if path is not None else None
    except OSError as error:
        raise StartupError(f"cannot read {path}: {error.strerror}") from error
