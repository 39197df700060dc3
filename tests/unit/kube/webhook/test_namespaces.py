from __future__ import annotations

import http.server
import json
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.processes.forkserver import until
from lastcall.kube.webhook import namespaces
from lastcall.kube.webhook.namespaces import Api, Namespaces


def namespace(name: str, **annotations: str) -> dict[str, Any]:
    return {
        "metadata": {
            "name": name,
            "annotations": {f"lastcall.dev/{key}": value for key, value in annotations.items()}
            | {"other": "x"},
        }
    }


class Server:
    """Speaks of namespaces as the API server does."""

    def __init__(self) -> None:
        self.items: dict[str, dict[str, Any]] = {}
        self.events: queue.Queue[dict[str, Any] | None] = queue.Queue()  # None ends the watch
        self.asked: list[tuple[str, str | None]] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append((self.path, self.headers.get("Authorization")))
                path, _, query = self.path.partition("?")
                name = path.removeprefix("/api/v1/namespaces").strip("/")
                if "watch=1" in query:
                    self.send_response(200)
                    self.end_headers()
                    while (event := outer.events.get()) is not None:
                        self.wfile.write(json.dumps(event).encode() + b"\n")
                        self.wfile.flush()
                elif name and name not in outer.items:
                    self.send_error(404)
                else:
                    self.send_response(200)
                    self.end_headers()
                    found = (
                        outer.items[name]
                        if name
                        else {"metadata": {"resourceVersion": "7"}, "items": list(outer.items.values())}
                    )
                    self.wfile.write(json.dumps(found).encode())

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def close(self) -> None:
        self.events.put(None)
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def test_namespaces_are_listed_and_followed(server: Server, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    server.items["a"] = namespace("a", enabled="true")
    known = Namespaces(Api(server.url, tmp_path / "token"))
    known.start()
    until(lambda: known.synced, "the list")
    assert known.tried and known.known("a") == {"lastcall.dev/enabled": "true"} and known.known("b") is None
    server.events.put({"type": "ADDED", "object": namespace("b")})
    server.events.put({"type": "MODIFIED", "object": namespace("a", enabled="false")})
    until(lambda: known.known("a") == {"lastcall.dev/enabled": "false"}, "the change")
    assert known.known("b") == {}
    server.events.put({"type": "DELETED", "object": namespace("b")})
    until(lambda: known.known("b") is None, "the removal")
    assert {said for _, said in server.asked} == {"Bearer secret"}


def test_a_watch_that_is_too_old_begins_again_with_a_list(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(namespaces, "_BACKOFF_SECONDS", (0.01, 0.01))
    server.items = {"a": namespace("a", enabled="true"), "b": namespace("b")}
    known = Namespaces(Api(server.url))
    known.start()
    until(lambda: known.known("b") == {}, "the list")
    del server.items["b"]
    server.items["a"] = namespace("a", enabled="false")
    server.events.put({"type": "ERROR", "object": {"message": "too old resource version"}})
    server.events.put(None)
    until(lambda: known.known("b") is None, "the second list")
    assert known.known("a") == {"lastcall.dev/enabled": "false"}


def test_a_namespace_that_is_a_moment_old_is_asked_for(server: Server) -> None:
    known = Namespaces(Api(server.url))
    server.items["new"] = namespace("new", enabled="true")
    assert known.ask("new") == {"lastcall.dev/enabled": "true"} == known.known("new")
    assert known.ask("gone") == {}
    assert known.ask("../secrets") == {}
    assert server.asked[-1][0] == "/api/v1/namespaces/..%2Fsecrets"


def test_without_an_api_server_it_is_ready_and_knows_nothing() -> None:
    known = Namespaces(None)
    known.start()
    assert known.tried and not known.synced and known.known("a") is None and known.ask("a") == {}


def test_an_api_server_that_cannot_be_reached_leaves_it_ready(caplog: pytest.LogCaptureFixture) -> None:
    known = Namespaces(Api("http://127.0.0.1:1"))
    known.start()
    until(lambda: known.tried, "the first try")
    assert not known.synced and known.ask("a") == {}
    assert (
        "could not watch namespaces" in caplog.text
        and "using only the object's own annotations" in caplog.text
    )


def test_a_pod_knows_its_api_server(tmp_path: Path) -> None:
    environ = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    assert namespaces.in_cluster(environ, tmp_path) is None
    (tmp_path / "token").touch()
    assert namespaces.in_cluster({}, tmp_path) is None
    assert namespaces.in_cluster(environ, tmp_path) == Api(
        "https://[fd00::1]:6443", tmp_path / "token", tmp_path / "ca.crt"
    )
