"""What a certificate is for."""

from __future__ import annotations

import enum
from collections.abc import Iterable

# Nobody can own a name in .internal, so that no public authority certifies one of these.
_DOMAIN = "specd.internal"


class Role(enum.StrEnum):
    """What the owner of a certificate is. The certificate has a DNS name for it, beside those of its hosts."""

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


# Who may read /metrics, of any process. Who may call what is in specd/rpc/access.py.
MAY_READ_METRICS = frozenset({Role.MONITORING})


def roles_in(dns_names: Iterable[str]) -> frozenset[Role]:
    """Return the roles that a certificate with these DNS names has."""
    names = frozenset(dns_names)
    return frozenset(role for role in Role if role.dns_name in names)
