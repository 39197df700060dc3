"""The webhook as an ASGI application: /mutate, /healthz, /readyz, /metrics."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from lastcall.kube.inject.inject import InjectOptions
from lastcall.kube.webhook import review
from lastcall.kube.webhook.metrics import Metrics
from lastcall.kube.webhook.namespaces import Namespaces

log = logging.getLogger("lastcall.kube")
# an update holds two objects, and the API server accepts none of more than 3 MiB
MOST_BYTES = 8 * 1024 * 1024
READ_SECONDS = 5.0
_LARGE_BYTES = 256 * 1024  # such a body is processed on a thread, so that probes are still answered


class BodyTooLarge(ValueError):
    """The body is larger than any that the API server sends."""


class Webhook:
    def __init__(self, options: InjectOptions, namespaces: Namespaces, metrics: Metrics) -> None:
        self.options = options
        self.namespaces = namespaces
        self.metrics = metrics

    def application(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/mutate", self.mutate, methods=["POST"]),
                Route("/healthz", self.health),
                Route("/readyz", self.ready),
                Route("/metrics", self.page),
            ]
        )

    async def mutate(self, http: Request) -> Response:
        began = time.perf_counter()
        try:
            body = await asyncio.wait_for(_body(http), READ_SECONDS)
            request, answer = await self._answered(body)
        except BodyTooLarge as error:
            return self._unreadable(413, str(error), began)
        except TimeoutError:
            return self._unreadable(408, f"the body did not come within {READ_SECONDS:g} s", began)
        except (review.UnreadableReview, ClientDisconnect) as error:
            return self._unreadable(400, str(error) or "the client has disconnected", began)
        seconds = time.perf_counter() - began
        self.metrics.count(answer.result, seconds)
        told = {
            **request.told(),
            "result": answer.result,
            "operations": answer.operations,
            "ms": round(seconds * 1000, 3),
        }
        level = (
            logging.DEBUG if answer.quiet else logging.ERROR if answer.result == "failed" else logging.INFO
        )
        log.log(level, answer.because, extra={"told": told}, exc_info=answer.failure)
        return Response(json.dumps(answer.document), media_type="application/json")

    async def health(self, http: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def ready(self, http: Request) -> Response:
        """Ready even without the namespaces, once they were requested: the objects' own annotations still
        work."""
        return (
            PlainTextResponse("ok\n")
            if self.namespaces.tried
            else PlainTextResponse("namespaces are being read\n", 503)
        )

    async def page(self, http: Request) -> Response:
        return PlainTextResponse(self.metrics.page(), media_type="text/plain; version=0.0.4")

    async def _answered(self, body: bytes) -> tuple[review.AdmissionRequest, review.AdmissionAnswer]:
        beside = len(body) > _LARGE_BYTES
        request = await asyncio.to_thread(review.parse, body) if beside else review.parse(body)
        namespace = await self._namespace(request.namespace)
        if beside:
            return request, await asyncio.to_thread(self._answer, request, namespace)
        return request, self._answer(request, namespace)

    def _answer(
        self, request: review.AdmissionRequest, namespace: Mapping[str, Any]
    ) -> review.AdmissionAnswer:
        return review.answer(request, options=self.options, namespace=namespace)

    async def _namespace(self, name: str) -> Mapping[str, Any]:
        known = self.namespaces.known(name)
        if known is None and name and self.namespaces.synced:
            return await asyncio.to_thread(self.namespaces.ask, name)
        return known or {}

    def _unreadable(self, status: int, because: str, began: float) -> Response:
        self.metrics.count("unreadable", time.perf_counter() - began)
        log.warning("could not read a request: %s", because)
        return PlainTextResponse(f"{because}\n", status)


async def _body(http: Request) -> bytes:
    parts, size = [], 0
    async for part in http.stream():
        size += len(part)
        if size > MOST_BYTES:
            raise BodyTooLarge(f"the body has more than {MOST_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)
