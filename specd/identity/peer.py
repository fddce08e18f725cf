"""The peer of a connection, identified by its certificate."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import lru_cache

from specd.identity.certificates import dns_names_of
from specd.identity.roles import Role, roles_in

_REMEMBERED = 1024  # certificates; a connection shows its own with each call


@dataclass(frozen=True)
class Peer:
    """The roles of a certificate, and the common names of its subject. A client must have exactly one."""

    roles: frozenset[Role] = frozenset()
    names: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name of a client. Raises ValueError with the reason if there is none."""
        if len(self.names) != 1:
            raise ValueError(f"the subject of this certificate has {len(self.names) or 'no'} common names")
        (name,) = self.names
        if not name.strip() or not name.isprintable():
            raise ValueError(f"the common name of this certificate is {name[:64]!r}")
        return name


@lru_cache(maxsize=_REMEMBERED)
def peer_of(pem: bytes) -> Peer:
    """Return the owner of a certificate, which TLS has verified; an unreadable one has no role and no name.

    gRPC's own properties of a peer are not enough: they cut names at a NUL, and have only the first of several names.
    """
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    try:
        certificate = x509.load_pem_x509_certificate(pem)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the name is empty, or longer than X.509 allows
            names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    except ValueError:
        return Peer()
    return Peer(roles_in(dns_names_of(certificate)), tuple(str(name.value) for name in names))
