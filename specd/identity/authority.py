"""A private authority and the certificates of a small installation, as PEM files in one directory."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from specd.caller import check_name
from specd.identity.roles import Role, roles_in
from specd.startup_error import StartupError

CA = "ca"
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
REACHED_BY_CLIENTS = frozenset({Role.COORDINATOR, Role.GATEWAY})
_CA_DAYS = 3650
# Certificates are valid from earlier on, because the clocks of other machines may be behind.
_BACKDATED = datetime.timedelta(minutes=10)
_NO_KEY_USE = dict.fromkeys(
    (
        *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
        *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
    ),
    False,
)


@dataclass(frozen=True)
class Leaf:
    """A certificate to make: the name of its files and of its owner, its role, and its hosts."""

    file: str
    name: str
    role: Role
    hosts: tuple[str, ...] = ()


def standard_leaves(hosts: Sequence[str]) -> list[Leaf]:
    """Return a certificate for each role. Only the processes that clients call have hosts, which clients check.

    A worker's certificate has only its role, so that a worker cannot pose as the coordinator on the same host.
    """
    reached = (*LOCAL_HOSTS, *(host for host in hosts if host not in LOCAL_HOSTS))
    return [Leaf(role.value, role.value, role, reached if role in REACHED_BY_CLIENTS else ()) for role in Role]


def client_leaf(name: str) -> Leaf:
    """Return the certificate of a client with this name. Raises StartupError if the name cannot be used."""
    check_name(name)
    if name in {role.value for role in Role}:
        raise StartupError(f"the name {name!r} is taken by a certificate that 'specd certs' makes: choose another name")
    return Leaf(f"client-{name}", name, Role.CLIENT)


class Authority:
    """The authority in a directory: its certificate, ca.crt, and its key, ca.key."""

    def __init__(self, directory: Path) -> None:
        """Read certificate and key. Raises StartupError."""
        self.directory = directory
        try:
            self._cert = x509.load_pem_x509_certificate((directory / f"{CA}.crt").read_bytes())
            key = serialization.load_pem_private_key((directory / f"{CA}.key").read_bytes(), None)
        except (OSError, ValueError, TypeError) as error:
            raise StartupError(f"cannot read ca.crt and ca.key, the authority in {directory}: {error}") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise StartupError(
                f"the key of the authority in {directory} was not made by 'specd certs': choose another directory"
            )
        self._key = key

    @property
    def ends_at(self) -> datetime.datetime:
        """The time at which its own certificate expires, and with it all others."""
        return self._cert.not_valid_after_utc

    @classmethod
    def create(cls, directory: Path) -> Authority:
        """Make a new authority. Raises StartupError, also if the directory has one already."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"specd authority {os.urandom(4).hex()}")])
        cert = (
            _builder(name, name, key.public_key(), _CA_DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(x509.KeyUsage(**{**_NO_KEY_USE, "key_cert_sign": True, "crl_sign": True}), critical=True)
            .sign(key, hashes.SHA256())
        )
        _write(directory, CA, key, [cert], replace=False)
        return cls(directory)

    def issue(self, leaf: Leaf, *, days: int, replace: bool) -> datetime.datetime:
        """Write FILE.crt and FILE.key, and return the time at which the certificate expires. Raises StartupError."""
        key = ec.generate_private_key(ec.SECP256R1())
        days = min(days, (self.ends_at - datetime.datetime.now(datetime.UTC)).days)
        if days < 1:
            raise StartupError(
                f"the authority in {self.directory} expires on {self.ends_at:%Y-%m-%d}: "
                "make a new one in another directory"
            )
        names = [x509.DNSName(leaf.role.dns_name), *map(_host, leaf.hosts)]
        uses = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if leaf.role not in {Role.CLIENT, Role.MONITORING}:
            uses.append(ExtendedKeyUsageOID.SERVER_AUTH)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, leaf.name)])
        cert = (
            _builder(subject, self._cert.subject, key.public_key(), days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.KeyUsage(**{**_NO_KEY_USE, "digital_signature": True}), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        _write(self.directory, leaf.file, key, [cert], replace=replace)
        return cert.not_valid_after_utc

    def has(self, leaf: Leaf) -> bool:
        """Return whether the directory has a certificate or a key with this file name."""
        return any((self.directory / f"{leaf.file}.{ending}").exists() for ending in ("crt", "key"))

    def leaves(self) -> list[Leaf]:
        """Return the certificates of this authority that are in the directory, in the order of their files."""
        found: list[Leaf] = []
        for path in sorted(self.directory.glob("*.crt")):
            if path.stem != CA:
                found += _leaf_in(path)
        return found


def _leaf_in(path: Path) -> Iterable[Leaf]:
    try:
        cert = x509.load_pem_x509_certificate(path.read_bytes())
        names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound):
        return
    dns_names = names.get_values_for_type(x509.DNSName)
    (owner,) = cert.subject.get_attributes_for_oid(NameOID.COMMON_NAME) or (None,)
    for role in roles_in(dns_names):
        hosts = [name for name in dns_names if name != role.dns_name]
        addresses = map(str, names.get_values_for_type(x509.IPAddress))
        yield Leaf(path.stem, str(owner.value if owner is not None else role), role, (*hosts, *addresses))


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise StartupError(f"--host is {host!r}: it must be an IP address or a host name in ASCII") from error


def _write(
    directory: Path,
    file: str,
    key: ec.EllipticCurvePrivateKey,
    certs: Sequence[x509.Certificate],
    *,
    replace: bool,
) -> None:
    """Write the key, readable by its owner alone, then the certificate. Each replaces an older file atomically."""
    key_pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    cert_pem = b"".join(cert.public_bytes(serialization.Encoding.PEM) for cert in certs)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, content, mode in ((f"{file}.key", key_pem, 0o600), (f"{file}.crt", cert_pem, 0o644)):
            path, beside = directory / name, directory / f".{name}.new"
            if path.exists() and not replace:
                raise StartupError(f"{path} exists already: add --renew to replace it")
            beside.unlink(missing_ok=True)
            with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as opened:
                opened.write(content)
            beside.replace(path)
    except OSError as error:
        raise StartupError(f"cannot write {directory}/{file}: {error.strerror}") from error
