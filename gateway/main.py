"""The gateway process."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import structlog
import uvicorn

from gateway.app import make_app
from gateway.http.connection import BoundedConnection
from gateway.service import Service
from specd.client import AsyncClient, RetryPolicy
from specd.gateway_settings import GatewaySettings
from specd.identity.certificates import load_certificates
from specd.lifeline import Lifeline
from specd.listening import listen
from specd.rpc.credentials import ClientCredentials
from specd.rpc.diagnosis import why_unreachable
from specd.rpc.metrics_endpoint import add_build_info, new_registry

log = structlog.get_logger()

_KEEP_ALIVE_SECONDS = 30
_MOST_HEADER_BYTES = 32 * 1024
# A request that the coordinator refuses is refused here too: HTTP's clients try again by themselves.
_RETRIES = RetryPolicy(only_resumes=True)


async def run(settings: GatewaySettings) -> None:
    """Run the gateway until a signal. Raises StartupError when it cannot start."""
    registry = new_registry()
    add_build_info(registry, "gateway")
    with contextlib.closing(listen(settings.listen)) as listener:
        host, _, _ = settings.listen.rpartition(":")
        address = f"{host}:{listener.getsockname()[1]}"
        certificates = load_certificates(settings, role=None)
        url = f"{'http' if certificates is None else 'https'}://{address}"
        credentials = _credentials(settings)
        async with AsyncClient(
            settings.coordinator, credentials=credentials, retries=_RETRIES, keeps_tokens=False
        ) as client:
            service = Service(client, settings)
            config = uvicorn.Config(
                make_app(service, registry),
                http=BoundedConnection,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                limit_concurrency=settings.max_connections,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=round(settings.shutdown_grace_seconds),
                h11_max_incomplete_event_size=_MOST_HEADER_BYTES,
            )
            config.load()
            config.ssl = certificates.renewing_ssl_context() if certificates is not None else None
            server = _Server(config)
            life = Lifeline()
            life.open()
            serving = asyncio.ensure_future(server.serve(sockets=[listener]))
            life.announce(address, url=url, metrics_url=f"{url}/metrics", coordinator=settings.coordinator)
            checking = asyncio.ensure_future(_say_why_not(client, credentials))
            await life.wait_for_stop()
            checking.cancel()
            server.should_exit = True
            await serving


def _credentials(settings: GatewaySettings) -> ClientCredentials:
    """Return what the gateway trusts and shows the coordinator; the tokens are its clients'."""
    files = (settings.coordinator_ca, settings.coordinator_cert, settings.coordinator_key)
    ca, cert, key = (Path(file) if file else None for file in files)
    return ClientCredentials(
        ca,
        cert,
        key,
        server_name=settings.coordinator_name,
        insecure=settings.insecure,
        option_prefix="--coordinator",  # the gateway's --tls-* are for its own port
    )


async def _say_why_not(client: AsyncClient, credentials: ClientCredentials) -> None:
    """Log why the coordinator does not serve, if it does not: the gateway waits for one that starts later."""
    if not await client.is_serving():
        why = (
            await asyncio.to_thread(why_unreachable, client.address, credentials)
            or "it has not answered yet, or is not ready"
        )
        log.warning("the coordinator does not serve yet", address=client.address, why=why)


class _Server(uvicorn.Server):
    """uvicorn's server, which leaves signals to the process."""

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()
