"""The command `specd certs`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from specd.identity.roles import Role
from specd.startup_error import StartupError


def certs(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of the certificates.")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="Name or address by which clients reach this installation; can be repeated.", metavar="NAME"),
    ] = None,
    client: Annotated[
        list[str] | None, typer.Option(help="Also make a certificate for a client of this name.", metavar="NAME")
    ] = None,
    days: Annotated[
        int, typer.Option(min=1, help="Days that certificates are valid; the authority is valid for ten years.")
    ] = (365),
    renew: Annotated[
        bool, typer.Option("--renew", help="Replace the certificates in DIR with new ones of the same authority.")
    ] = False,
) -> None:
    """Make a private authority and its certificates for the processes, a client and Prometheus.

    Run it again with --renew before the certificates expire. Processes read new files without a restart.
    """
    from specd.identity.authority import CA, REACHED_BY_CLIENTS, Authority, client_leaf, standard_leaves

    others = [client_leaf(name) for name in client or ()]
    is_new = not (directory / f"{CA}.crt").exists() and not (directory / f"{CA}.key").exists()
    if is_new and renew:
        raise StartupError(f"there are no certificates in {directory} to renew: leave out --renew")
    authority = Authority.create(directory) if is_new else Authority(directory)
    if renew:
        leaves = authority.leaves()
        if host:
            anew = [leaf for leaf in standard_leaves(host) if leaf.role in REACHED_BY_CLIENTS]
            leaves = [*anew, *(leaf for leaf in leaves if leaf.role not in REACHED_BY_CLIENTS)]
    else:
        leaves = standard_leaves(host or ()) if is_new else []
    leaves += [leaf for leaf in others if leaf not in leaves]
    if there := [leaf.file for leaf in leaves if not renew and authority.has(leaf)]:
        raise StartupError(f"{directory} has {', '.join(there)} already: add --renew to replace it")
    if not leaves:
        raise StartupError(
            f"there are certificates in {directory} already: add --renew to replace them, or --client NAME to make one "
            "for another client"
        )
    ends = min([authority.issue(leaf, days=days, replace=renew) for leaf in leaves])

    table = Table("file", "for", box=None, pad_edge=False, header_style="bold")
    if is_new:
        table.add_row("ca.key", "signs new certificates: keep it away from the machines that serve")
        table.add_row("ca.crt", "tls_ca of every process; SPECD_TLS_CA of clients")
    for leaf in leaves:
        table.add_row(f"{leaf.file}.crt, .key", _USES[leaf.role].format(hosts=", ".join(leaf.hosts)))
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"made in {directory}:")
    console.print(table)
    console.print(f"valid until {ends:%Y-%m-%d}; 'specd certs {directory} --renew' renews them")


_USES = {
    Role.COORDINATOR: "tls_cert and tls_key of the coordinator, at {hosts}",
    Role.DRAFT_WORKER: "tls_cert and tls_key of the draft worker",
    Role.TARGET_WORKER: "tls_cert and tls_key of the target worker",
    Role.GATEWAY: "tls_cert and tls_key of the gateway, at {hosts}, and its coordinator_cert and coordinator_key",
    Role.CLIENT: "SPECD_TLS_CERT and SPECD_TLS_KEY of a client",
    Role.MONITORING: "cert_file and key_file of Prometheus, in tls_config",
}
