from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from typing import Any

import pytest

from helpers.kube import objects
from helpers.kube.objects import ON, job
from lastcall.kube.inject import inject
from lastcall.kube.inject.inject import InjectOptions
from lastcall.kube.webhook import app, logs
from lastcall.kube.webhook.metrics import Metrics
from lastcall.kube.webhook.namespaces import Namespaces


def webhook(**known: dict[str, Any]) -> app.Webhook:
    followed = Namespaces(None)
    followed.start()
    followed._known.update(known)
    return app.Webhook(InjectOptions(image="lastcall:1"), followed, Metrics())


def called(hook: app.Webhook, method: str, path: str, parts: Iterable[bytes] = (b"",)) -> tuple[int, str]:
    """A request to the application, without a server: its status and its body."""
    sent: list[dict[str, Any]] = []
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [],
    }

    async def pieces() -> AsyncIterator[dict[str, Any]]:
        for part in parts:
            yield {"type": "http.request", "body": part, "more_body": True}
        yield {"type": "http.request", "body": b"", "more_body": False}

    async def run() -> None:
        coming = pieces()

        async def receive() -> dict[str, Any]:
            return await anext(coming)

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await hook.application()(scope, receive, send)  # type: ignore[arg-type]

    asyncio.run(run())
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent).decode()


def test_a_review_is_answered() -> None:
    status, body = called(webhook(), "POST", "/mutate", [objects.review(job())])
    assert status == 200 and objects.operations(json.loads(body))


def test_the_annotations_of_the_namespace_count() -> None:
    _, body = called(webhook(team=ON), "POST", "/mutate", [objects.review(job({}))])
    assert objects.operations(json.loads(body))
    _, body = called(webhook(other=ON), "POST", "/mutate", [objects.review(job({}))])
    assert not objects.operations(json.loads(body))


def test_a_namespace_that_is_not_known_yet_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    hook = webhook()
    hook.namespaces.synced = True
    monkeypatch.setattr(hook.namespaces, "ask", lambda name: ON if name == "team" else {})
    _, body = called(hook, "POST", "/mutate", [objects.review(job({}))])
    assert objects.operations(json.loads(body))


def test_a_large_object_is_answered_all_the_same() -> None:
    obj = job()
    obj["metadata"]["annotations"]["filling"] = "x" * 5_000_000
    status, body = called(webhook(), "POST", "/mutate", [objects.review(obj)])
    assert status == 200 and objects.operations(json.loads(body))


def test_what_is_no_review_is_told_so_and_the_next_one_is_answered() -> None:
    hook = webhook()
    assert called(hook, "POST", "/mutate", [b"{"]) == (400, "not JSON: JSONDecodeError\n")
    assert called(hook, "POST", "/mutate", [objects.review(job({}))])[0] == 200
    assert 'lastcall_webhook_requests_total{result="unreadable"} 1' in hook.metrics.page()


def test_an_error_of_our_own_is_logged_with_its_trace(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(inject, "inject", broken)
    status, body = called(webhook(), "POST", "/mutate", [objects.review(job())])
    assert (status, json.loads(body)["response"]) == (200, {"uid": "abc", "allowed": True})
    line = json.loads(logs.JsonLines().format(caplog.records[-1]))
    assert (line["level"], line["kind"], line["result"]) == (
        "error",
        "Job",
        "failed",
    ) and "in broken" in line["trace"]


def test_a_warning_is_logged_and_an_object_that_is_nobodys_business_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A controller shows the warnings that it gets to nobody."""
    caplog.set_level("INFO", "lastcall.kube")
    called(webhook(), "POST", "/mutate", [objects.review(job({}))])
    assert not caplog.records
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "x", "uid": "1", "controller": True}
    wrong = objects.made(
        "v1", "Pod", objects.pod(), {"lastcall.dev/enabled": "sure"}, ownerReferences=[owner]
    )
    called(webhook(), "POST", "/mutate", [objects.review(wrong)])
    assert "the job runs unprotected" in caplog.text


def test_a_body_without_end_is_not_read_to_its_end() -> None:
    read = 0

    def parts() -> Iterable[bytes]:
        nonlocal read
        while True:
            read += 1
            yield b"x" * 1_000_000

    assert called(webhook(), "POST", "/mutate", parts())[0] == 413
    assert read < 20


def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(_: object) -> bytes:
        await asyncio.sleep(3600)
        return b""

    monkeypatch.setattr(app, "READ_SECONDS", 0.01)
    monkeypatch.setattr(app, "_body", never)
    assert called(webhook(), "POST", "/mutate")[0] == 408


def test_health_and_readiness() -> None:
    hook = webhook()
    assert called(hook, "GET", "/healthz") == called(hook, "GET", "/readyz") == (200, "ok\n")
    hook.namespaces = Namespaces(None)  # not started: nothing was tried yet
    assert called(hook, "GET", "/readyz")[0] == 503
    assert called(hook, "GET", "/mutate")[0] == 405


def test_metrics_count_what_became_of_the_requests() -> None:
    hook = webhook()
    hook.metrics.gauge("lastcall_up", "Whether it is.", lambda: True)
    for obj in (job(), job(), job({}), job({"lastcall.dev/enabled": "sure"})):
        called(hook, "POST", "/mutate", [objects.review(obj)])
    page = called(hook, "GET", "/metrics")[1]
    for line in (
        '{result="patched"} 2',
        '{result="unchanged"} 1',
        '{result="refused"} 1',
        '{result="failed"} 0',
    ):
        assert f"lastcall_webhook_requests_total{line}\n" in page
    assert (
        "lastcall_webhook_request_seconds_count 4\n" in page
        and 'lastcall_webhook_request_seconds_bucket{le="+Inf"} 4\n' in page
    )
    assert "# TYPE lastcall_up gauge\nlastcall_up 1\n" in page
