"""Explanations of failed TLS connections, for people.

gRPC's own message is "Socket closed" where a server refuses a certificate. So this module connects again with Python's
own TLS, whose errors are precise.
"""

from __future__ import annotations

import socket
import ssl

from specd.errors import StartupError
from specd.identity.certificates import CertificateFiles, Certificates
from specd.rpc.credentials import ClientCredentials, client_context

_SECONDS = 3.0
# An HTTP/2 client begins with the preface and an empty SETTINGS frame. A server that accepts it answers with its own.
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
# From OpenSSL's x509_vfy.h.
_NOT_YET_VALID, _EXPIRED, _HOST_MISMATCH, _ADDRESS_MISMATCH = 9, 10, 62, 64


def why_unreachable(address: str, credentials: ClientCredentials) -> str:
    """Return the reason why TLS fails between a client with these credentials and a server at HOST:PORT, or "".

    It connects as gRPC does, and blocks for a few seconds at most.
    """
    if address.startswith("unix:"):
        return ""
    try:
        return (
            _why_no_tls(address, credentials) if credentials.ca is not None else _why_no_plaintext(address, credentials)
        )
    except ssl.SSLError as error:
        return _in_words(error, address, credentials)
    except OSError:
        return ""  # no process answers there, which gRPC itself reports


def _why_no_plaintext(address: str, credentials: ClientCredentials) -> str:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with _connect(address) as connection, context.wrap_socket(connection):
            option = f"{credentials.option_prefix}-ca"
            return f"the process at {address} uses TLS: set {option} to the authority of its certificate"
    except ssl.SSLError:
        return ""


def _why_no_tls(address: str, credentials: ClientCredentials) -> str:
    assert credentials.ca is not None
    try:
        context = client_context(credentials.ca, credentials.cert, credentials.key)
        if credentials.cert is not None and credentials.key is not None:
            Certificates(CertificateFiles(credentials.cert, credentials.key), role=None)
    except StartupError as error:
        return str(error)
    context.set_alpn_protocols(["h2"])
    name = credentials.server_name or _host(address)
    with _connect(address) as connection, context.wrap_socket(connection, server_hostname=name) as secured:
        secured.sendall(_HELLO)
        if secured.recv(1):
            return ""
    if credentials.cert is None:
        prefix = credentials.option_prefix
        return f"the process at {address} needs a client's certificate: set {prefix}-cert and {prefix}-key"
    return (
        f"the process at {address} refuses the certificate {credentials.cert}: use one of the authority that it trusts"
    )


def _in_words(error: ssl.SSLError, address: str, credentials: ClientCredentials) -> str:
    if not isinstance(error, ssl.SSLCertVerificationError):
        if error.reason == "WRONG_VERSION_NUMBER":
            option = f"{credentials.option_prefix}-ca"
            return f"the process at {address} uses plaintext: leave out {option}, or give that process a certificate"
        return f"TLS with {address} fails: {error.reason or error}"
    if error.verify_code in {_NOT_YET_VALID, _EXPIRED}:
        when = "has expired: renew it" if error.verify_code == _EXPIRED else "is not valid yet: wait"
        return f"the certificate of {address} {when}, or set this machine's clock"
    if error.verify_code in {_HOST_MISMATCH, _ADDRESS_MISMATCH}:
        return (
            f"the certificate of {address} is not for {credentials.server_name or _host(address)}: "
            f"set {credentials.option_prefix}-name to a name that it has, or make a new certificate with this name "
            "('specd certs --host')"
        )
    return (
        f"the certificate of {address} was not issued by the authority in {credentials.ca} ({error.verify_message}): "
        "use the ca.crt that was made with it"
    )


def _connect(address: str) -> socket.socket:
    return socket.create_connection((_host(address), int(address.rpartition(":")[2])), _SECONDS)


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")
