"""An installation with certificates and tokens: its processes, and what those who want in may have."""

from __future__ import annotations

import datetime
import http.client
import ssl
import sys
import warnings
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID

from specd.child import Child
from specd.identity.authority import Authority, standard_leaves
from specd.identity.roles import Role
from specd.identity.tokens import Token, new_token, write_tokens
from specd.rpc.credentials import ClientCredentials
from tests.e2e.processes import PATIENCE_SECONDS, environment

# From a process that is guarded to the name that its certificate has.
NAMES = {role.value: role.dns_name for role in Role}


def make_certificates(directory: Path) -> Path:
    """Make an authority and a certificate for each role, as `specd certs` does."""
    authority = Authority.create(directory)
    for leaf in standard_leaves(()):
        authority.issue(leaf, days=30, replace=False)
    return directory


def expire(directory: Path, name: str) -> None:
    """Replace a certificate by one that differs in its dates alone: it expired a day ago."""
    old = x509.load_pem_x509_certificate((directory / f"{name}.crt").read_bytes())
    key = load_pem_private_key((directory / "ca.key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(
        old.issuer,
        old.subject,
        old.public_key(),
        x509.random_serial_number(),
        now - datetime.timedelta(days=9),
        now - datetime.timedelta(days=1),
        list(old.extensions),
    )
    (directory / f"{name}.crt").write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))


def make_client(directory: Path, file: str, names: Sequence[str], *, role_name: str = Role.CLIENT.dns_name) -> None:
    """Let the authority in a directory make a certificate with any common names; 'specd certs' would make none."""
    authority = x509.load_pem_x509_certificate((directory / "ca.crt").read_bytes())
    authority_key = load_pem_private_key((directory / "ca.key").read_bytes(), None)
    assert isinstance(authority_key, ec.EllipticCurvePrivateKey)
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a name that is empty
        subject = [x509.NameAttribute(NameOID.COMMON_NAME, name, _validate=False) for name in names]
    builder = x509.CertificateBuilder(
        authority.subject, x509.Name(subject), key.public_key(), x509.random_serial_number(), now - day, now + day
    ).add_extension(x509.SubjectAlternativeName([x509.DNSName(role_name)]), critical=False)
    (directory / f"{file}.crt").write_bytes(builder.sign(authority_key, hashes.SHA256()).public_bytes(Encoding.PEM))
    (directory / f"{file}.key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def credentials(directory: Path, role: Role | None = None, *, token: str = "") -> ClientCredentials:
    """Return the credentials of a client that trusts the authority in a directory, and has the role's certificate."""
    cert, key = (directory / f"{role}.{ending}" if role else None for ending in ("crt", "key"))
    return ClientCredentials(directory / "ca.crt", cert, key, token)


def files_of(directory: Path, role: Role) -> list[str]:
    """Return the options of a process for its certificate."""
    return [
        *("--tls-cert", str(directory / f"{role}.crt")),
        *("--tls-key", str(directory / f"{role}.key")),
        *("--tls-ca", str(directory / "ca.crt")),
    ]


@dataclass
class Guarded:
    """Processes that listen on the loopback address over TLS, each with the certificate of its role."""

    certs: Path
    children: dict[str, Child] = field(default_factory=dict)

    def address(self, name: str) -> str:
        """Return where a process listens."""
        return self.children[name].facts["address"]

    async def start(self, stack: AsyncExitStack, role: Role, *options: str, name: str = "") -> None:
        """Start a process; it stops with the stack."""
        command = [sys.executable, "-m", "specd", role.value, *files_of(self.certs, role)]
        command += ["--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0", *options]
        child = Child(name or role.value, command, environment())
        self.children[child.name] = child
        stack.push_async_callback(child.stop)
        await child.start()
        command[command.index("--listen") + 1] = child.facts["address"]  # also after a restart


@asynccontextmanager
async def guarded(directory: Path) -> AsyncIterator[Guarded]:
    """Start a draft worker, a target worker and a coordinator that take certificates."""
    async with AsyncExitStack() as stack:
        running = Guarded(make_certificates(directory))
        for worker in (Role.TARGET_WORKER, Role.DRAFT_WORKER):
            await running.start(stack, worker)
        await running.start(stack, Role.COORDINATOR, *workers_of(running))
        yield running


def workers_of(running: Guarded) -> list[str]:
    """Return the options of a coordinator for the workers."""
    return ["--target", running.address(Role.TARGET_WORKER), "--draft", running.address(Role.DRAFT_WORKER)]


def write_token(path: Path, name: str, *others: Token, **fields: object) -> str:
    """Write a file with a new token and others, and return the new one's text."""
    text, token = new_token(name, **fields)  # type: ignore[arg-type]
    write_tokens(path, [token, *others])
    return text


def make_tokens(path: Path, *names: str, **limits: Mapping[str, int]) -> list[str]:
    """Write a file with new tokens of clients by name, some with limits, and return the tokens."""
    made = [new_token(name, **limits.get(name, {})) for name in names]  # type: ignore[arg-type]
    write_tokens(path, [token for _, token in made])
    return [text for text, _ in made]


def read_metrics_over_tls(child: Child, given: ClientCredentials) -> tuple[int, str]:
    """Return status and text of a process's metrics. Raises ssl.SSLError or OSError where TLS fails."""
    context = ssl.create_default_context(cafile=given.ca)
    context.check_hostname = False  # the certificates of workers have no host
    if given.cert is not None and given.key is not None:
        context.load_cert_chain(given.cert, given.key)
    connection = http.client.HTTPSConnection(child.facts["metrics_address"], timeout=PATIENCE_SECONDS, context=context)
    try:
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()
