"""The webhook as a process: a socket, TLS whose certificate is renewed while connections are served, and the
shutdown on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from dataclasses import dataclass

import uvicorn

from lastcall.kube.inject.inject import InjectOptions
from lastcall.kube.webhook import app, namespaces
from lastcall.kube.webhook.metrics import Metrics
from lastcall.kube.webhook.tls import LOOK_SECONDS, Serving

log = logging.getLogger("lastcall.kube")
_END_SECONDS = 5  # for requests that are in progress at the shutdown
_KEEP_ALIVE_SECONDS = 120  # longer than the API server keeps a connection that it does not use


@dataclass(frozen=True)
class Address:
    host: str = ""  # all addresses of the machine
    port: int = 8443

    def bound(self) -> socket.socket:
        both = not self.host and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both or ":" in self.host else socket.AF_INET
        bound = socket.create_server((self.host, self.port), family=family, dualstack_ipv6=both, backlog=512)
        # Inherited by every connection. asyncio sets it only on sockets that it has made itself; without it
        # each answer waits 40 ms.
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return bound


def run(options: InjectOptions, serving: Serving, api: namespaces.Api | None, address: Address) -> None:
    """Serve until a signal ends it."""
    known = namespaces.Namespaces(api)
    metrics = Metrics()
    metrics.gauge(
        "lastcall_webhook_certificate_ends_seconds",
        "When the served certificate expires.",
        lambda: serving.served.ends,
    )
    metrics.gauge(
        "lastcall_webhook_namespaces_synced",
        "Whether the annotations of namespaces are followed.",
        lambda: known.synced,
    )
    webhook = app.Webhook(options, known, metrics)
    with address.bound() as bound:
        known.start()
        asyncio.run(_serve(webhook, serving, bound))


async def _serve(webhook: app.Webhook, serving: Serving, bound: socket.socket) -> None:
    config = uvicorn.Config(
        webhook.application(),
        http="h11",
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_END_SECONDS,
        ssl_context_factory=lambda config, default: serving.context,
    )
    host, port, *_ = bound.getsockname()
    log.info("serving", extra={"told": {"host": host, "port": port, "image": webhook.options.image}})
    looking = asyncio.create_task(_look(serving))
    try:
        await uvicorn.Server(config).serve(sockets=[bound])
    finally:
        looking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await looking


async def _look(serving: Serving) -> None:
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        try:
            why = await asyncio.to_thread(serving.look)
        except (OSError, ValueError) as error:
            # files that are being replaced: the old certificate stays in use
            log.warning("could not renew the certificate: %s", error)
            continue
        if why is not None:
            log.info("renewed the certificate: %s", why, extra={"told": {"ends": serving.served.ends}})
