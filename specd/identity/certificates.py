"""A process's certificate: read from files, checked, and read again when the files change."""

from __future__ import annotations

import contextlib
import datetime
import re
import ssl
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from specd.identity.file_state import FileState, state_of
from specd.identity.roles import Role, roles_in
from specd.settings import CertificateSettings
from specd.startup_error import StartupError

if TYPE_CHECKING:
    from cryptography import x509

log = structlog.get_logger()

_WARN_DAYS = 14


@dataclass(frozen=True)
class CertificateFiles:
    """PEM files: a certificate with the intermediate ones, its key, and the authority of peers."""

    cert: Path
    key: Path
    ca: Path | None = None

    @property
    def state(self) -> tuple[FileState | None, ...]:
        """The state of each file, which differs once the file has changed."""
        return tuple(state_of(path) for path in (self.cert, self.key, self.ca) if path is not None)


@dataclass(frozen=True)
class Pems:
    """The content of the files."""

    cert: bytes
    key: bytes
    ca: bytes | None


class Certificates:
    """A certificate, its key, and the authority that must have issued peers' certificates.

    `refresh` reads the files again if they have changed, from any thread. New files are used if they pass the checks
    of the start; otherwise the old ones stay, and the log has the reason. So a typing mistake locks no client out. TLS
    checks certificates only when a connection begins, and gRPC for Python has no revocation lists.
    """

    def __init__(self, files: CertificateFiles, *, role: Role | None, clock: Callable[[], float] = time.time) -> None:
        """Read the files. Raises StartupError, which names the file and the remedy.

        With a `role`, the certificate must have it, and be issued by the authority in `files.ca`: peers check both.
        """
        self.files, self._role, self._clock = files, role, clock
        self._lock = threading.Lock()
        self._state = files.state
        self._expiry_said = False
        self.generation = 0
        self.pems, self._expires_at = _read(self.files, self._role, self._clock())
        self._warn()

    @property
    def has_ca(self) -> bool:
        """Whether peers must present a certificate."""
        return self.files.ca is not None

    def refresh(self) -> None:
        """Read the files again if they have changed. Each change increases `generation`."""
        with self._lock:
            state = self.files.state
            if state != self._state:
                self._state = state
                try:
                    self.pems, self._expires_at = _read(self.files, self._role, self._clock())
                except StartupError as error:
                    log.error("kept the old certificate: the new one cannot be used", error=str(error))
                    return
                self.generation += 1
                self._expiry_said = False
                log.info("took a new certificate", cert=str(self.files.cert), expires=_day(self._expires_at))
            self._warn()

    def ssl_context(self) -> ssl.SSLContext:
        """Return the context for one of Python's own servers; a new one for each `generation`."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.files.cert, self.files.key)
        if self.files.ca is not None:
            context.load_verify_locations(self.files.ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def renewing_ssl_context(self) -> ssl.SSLContext:
        """Return the same for a server that keeps one context: each new connection gets the current files.

        The authority of peers stays the first one.
        """
        given, context = self.generation, self.ssl_context()
        latest = context

        def before_handshake(connection: ssl.SSLObject | ssl.SSLSocket, _: str | None, __: ssl.SSLContext) -> None:
            nonlocal given, latest
            self.refresh()
            if self.generation != given:
                given, latest = self.generation, self.ssl_context()
            connection.context = latest

        context.sni_callback = before_handshake
        return context

    def _warn(self) -> None:
        days = (self._expires_at - self._clock()) / 86400
        if days < _WARN_DAYS and not self._expiry_said:
            self._expiry_said = True
            what = "a certificate has expired" if days < 0 else "a certificate expires soon"
            log.warning(what, cert=str(self.files.cert), expires=_day(self._expires_at))


def check_certificates(settings: CertificateSettings) -> None:
    """Raise StartupError if the certificate files of a process cannot be used. Their role does not matter here."""
    if settings.tls_cert:
        _read(_files_of(settings), None, time.time())


def load_certificates(settings: CertificateSettings, *, role: Role | None) -> Certificates | None:
    """Return the certificates of a process, or None if none are set. Raises StartupError."""
    if not settings.tls_cert:
        return None
    return Certificates(_files_of(settings), role=role)


def _files_of(settings: CertificateSettings) -> CertificateFiles:
    ca = Path(settings.tls_ca) if settings.tls_ca else None
    return CertificateFiles(Path(settings.tls_cert), Path(settings.tls_key), ca)


def _read(files: CertificateFiles, role: Role | None, now: float) -> tuple[Pems, float]:
    """Return the content of the files, and when the certificate expires. Raises StartupError."""
    pems = Pems(
        _content(files.cert),
        _content(files.key, "its private key"),
        _content(files.ca) if files.ca is not None else None,
    )
    chain = _parse(pems.cert, files.cert)
    _check_key(pems, files)
    leaf = chain[0]
    _check_dates(leaf, files.cert, now)
    authorities = _parse(pems.ca, files.ca) if pems.ca is not None and files.ca is not None else []
    for authority in authorities:
        _check_dates(authority, files.ca or files.cert, now)
    if role is not None:
        names = dns_names_of(leaf)
        if role not in roles_in(names):
            raise StartupError(
                f"the certificate {files.cert} is not for a {role}: it has the names "
                f"{', '.join(sorted(names)) or '(none)'}, and not {role.dns_name}; "
                f"use the one that 'specd certs' makes for a {role}"
            )
        if authorities and not _is_issued_by(chain, authorities):
            raise StartupError(
                f"the certificate {files.cert} was not issued by the authority in {files.ca}, which this "
                "process and its peers trust: use files that were made together"
            )
    return pems, leaf.not_valid_after_utc.timestamp()


def authority_of(certificate: Path, given: Path | None) -> Path:
    """Return a file with the authority of a certificate: the given file, the certificate itself, or the system's file.

    Raises StartupError if none of them issued the certificate.
    """
    chain = _parse(_content(certificate), certificate)
    candidates = (given, certificate, ssl.get_default_verify_paths().cafile)
    for path in [Path(each) for each in candidates if each is not None]:
        if path.is_file() and _is_issued_by(chain, _usable_in(path)):
            return path
    raise StartupError(
        f"the certificate {certificate} was issued by an unknown authority: set --tls-ca to the authority's certificate"
    )


def name_of(certificate: Path, host: str) -> str:
    """Return a name that clients must expect if a certificate is not for `host`; "" if it is."""
    from cryptography import x509

    leaf = _parse(_content(certificate), certificate)[0]
    names = dns_names_of(leaf)
    with contextlib.suppress(x509.ExtensionNotFound, ValueError):
        found = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        if host in {*names, *map(str, found.get_values_for_type(x509.IPAddress))}:
            return ""
    return next((name.replace("*", "specd") for name in sorted(names)), "")


def dns_names_of(certificate: x509.Certificate) -> set[str]:
    """Return the DNS names in a certificate."""
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, x509.DuplicateExtension, x509.UnsupportedGeneralNameType, ValueError):
        return set()
    return set(names.get_values_for_type(x509.DNSName))


def _content(path: Path, what: str = "a certificate") -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StartupError(f"cannot read {path}: {error.strerror}; name the file of {what} in PEM form") from error


def not_pem(path: Path, kind: str = "CERTIFICATE") -> StartupError:
    """Return the error of a file that has nothing of this kind in PEM form."""
    return StartupError(f"{path} has no {kind.lower()} in PEM form: name a file with -----BEGIN {kind}-----")


def _parse(pem: bytes, path: Path) -> list[x509.Certificate]:
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise not_pem(path) from error


def _usable_in(path: Path) -> list[x509.Certificate]:
    """Return the readable certificates in a file: the system's file has many authorities, some of them unreadable."""
    from cryptography import x509

    pems = re.findall(rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", _content(path), re.DOTALL)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for pem in pems:
            with contextlib.suppress(ValueError):
                found.append(x509.load_pem_x509_certificate(pem))
    return found


def _check_key(pems: Pems, files: CertificateFiles) -> None:
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(pems.key, password=None)
    except TypeError as error:
        raise StartupError(f"the key {files.key} has a password: use a key without one, in mode 0600") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise not_pem(files.key, "PRIVATE KEY") from error
    if x509.load_pem_x509_certificate(pems.cert).public_key() != key.public_key():
        raise StartupError(
            f"the key {files.key} does not belong to the certificate {files.cert}: use files that were made together"
        )


def _check_dates(certificate: x509.Certificate, path: Path, now: float) -> None:
    begins, ends = certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp()
    if now > ends:
        raise StartupError(
            f"the certificate {path} expired on {_day(ends)}: renew it ('specd certs DIR --renew' does), "
            "or set this machine's clock"
        )
    if now < begins:
        raise StartupError(f"the certificate {path} is not valid before {_day(begins)}: set this machine's clock")


def _is_issued_by(chain: list[x509.Certificate], authorities: list[x509.Certificate]) -> bool:
    """Return whether one of the authorities issued the first certificate, by way of the others."""
    certificate, between = chain[0], chain[1:]
    while True:
        if any(_issued(certificate, authority) for authority in authorities):
            return True
        issuer = next((each for each in between if _issued(certificate, each)), None)
        if issuer is None:
            return False
        certificate, between = issuer, [each for each in between if each is not issuer]


def _issued(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _day(unix_seconds: float) -> str:
    moment = datetime.datetime.fromtimestamp(unix_seconds, datetime.UTC)
    return moment.strftime("%Y-%m-%d %H:%M UTC")
