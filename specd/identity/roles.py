"""Roles of certificates."""

from __future__ import annotations

import enum
from collections.abc import Iterable

# Names in .internal cannot be registered, so no public authority certifies one of these.
_DOMAIN = "specd.internal"


class Role(enum.StrEnum):
    """The role of a certificate's owner. The certificate has a DNS name for it, in addition to its hosts.

    A DNS name is a property that both ends can check: gRPC verifies the name that a client expects, and shows a server
    the names of its peer.
    """

    COORDINATOR = "coordinator"
    DRAFT_WORKER = "draft-worker"
    TARGET_WORKER = "target-worker"
    GATEWAY = "gateway"
    CLIENT = "client"
    MONITORING = "monitoring"

    @property
    def dns_name(self) -> str:
        """The name in the certificate, such as target-worker.specd.internal."""
        return f"{self.value}.{_DOMAIN}"


# The roles that may read /metrics of any process. specd/rpc/access.py has the roles that may call each method.
MAY_READ_METRICS = frozenset({Role.MONITORING})


def roles_in(dns_names: Iterable[str]) -> frozenset[Role]:
    """Return the roles that a certificate with these DNS names has."""
    names = frozenset(dns_names)
    return frozenset(role for role in Role if role.dns_name in names)
