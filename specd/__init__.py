"""specd: speculative decoding as a gRPC service on MLX."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specd.client import AsyncClient, Client, ClientCredentials

    __version__: str

__all__ = ["AsyncClient", "Client", "ClientCredentials", "__version__"]


def __getattr__(name: str) -> Any:
    """Import the client only when it is used: importing gRPC takes long, and workers do not need the client."""
    if name == "__version__":
        import specd.version

        return specd.version.__version__
    if name in __all__:
        import specd.client

        return getattr(specd.client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
