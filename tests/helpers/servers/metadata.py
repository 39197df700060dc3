"""Local servers that speak the metadata protocols of the three clouds as documented, and misbehave on
demand."""

from __future__ import annotations

import json
import threading
import time
import uuid
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

from helpers.processes.forkserver import PATIENCE

BAD = ("hang", "500", "garbage", "types", "huge", "dribble", "disconnect", "redirect", "not-http")


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def handle_one(self) -> None:
        owner = self.server.owner
        owner.note(self.command, self.path)
        if owner.behaviour == "good":
            owner.answer(self)
        else:
            owner.misbehave(self)

    do_GET = do_PUT = do_POST = handle_one  # noqa: N815

    def reply(self, status: int, body: str | bytes = b"", **headers: str) -> None:
        data = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    owner: MetadataServer
    request_queue_size = 64

    def handle_error(self, *_: object) -> None:
        """The client left early: that is what it is meant to do with a bad server."""


class MetadataServer:
    """Use as a context. `behaviour` is "good" or one of BAD and may be changed at any time."""

    wrong_types: ClassVar[str] = '{"action": 5, "time": [], "noticeTime": {}, "Events": "none"}'

    def __init__(self) -> None:
        self.behaviour = "good"
        self.requests: list[tuple[str, str]] = []
        self.changed = threading.Condition()
        self.over = threading.Event()
        self._http = _Server(("127.0.0.1", 0), _Handler)
        self._http.owner = self
        self.host = f"127.0.0.1:{self._http.server_address[1]}"
        self.url = f"http://{self.host}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=[0.02], daemon=True)

    def __enter__(self) -> Any:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        with self.changed:
            self.changed.notify_all()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def note(self, method: str, path: str) -> None:
        with self.changed:
            self.requests.append((method, path))
            self.changed.notify_all()

    def wait_for_requests(self, more: int, part: str = "") -> None:
        """Until so many further requests have come, for paths with this part."""

        def count() -> int:
            return sum(part in path for _, path in self.requests)

        with self.changed:
            goal = count() + more
            assert self.changed.wait_for(lambda: count() >= goal, PATIENCE), (
                f"asked too seldom: {self.requests[-5:]}"
            )

    def answer(self, request: _Handler) -> None:
        raise NotImplementedError

    def misbehave(self, request: _Handler) -> None:
        match self.behaviour:
            case "hang":
                self.over.wait()
            case "500":
                request.reply(500, "internal error")
            case "garbage":
                request.reply(200, b"\x00\xff<html>\xfe", Metadata_Flavor="Google")
            case "types":
                request.reply(200, self.wrong_types, Metadata_Flavor="Google")
            case "huge":
                request.reply(200, b"x" * (1 << 20), Metadata_Flavor="Google")
            case "dribble":
                self._dribble(request)
            case "disconnect":
                request.close_connection = True
            case "redirect":
                request.reply(302, Location=f"{self.url}/elsewhere")
            case "not-http":
                request.wfile.write(b"SSH-2.0-OpenSSH_9.6\r\n" * 3)
            case other:
                raise AssertionError(other)

    def _dribble(self, request: _Handler) -> None:
        """Headers that never end, a byte at a time: no single read of the client ever waits long."""
        request.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
        while not self.over.wait(0.02):
            request.wfile.write(b"x")
            request.wfile.flush()


class AwsServer(MetadataServer):
    """IMDSv2: a token by PUT, without which every GET is refused."""

    def __init__(self) -> None:
        super().__init__()
        self.items: dict[str, str] = {}
        self._tokens: set[str] = set()

    def interrupt(self, seconds: float, action: str = "terminate") -> None:
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + seconds))
        self.items["spot/instance-action"] = json.dumps({"action": action, "time": when})

    def expire_tokens(self) -> None:
        self._tokens.clear()

    def answer(self, request: _Handler) -> None:
        if request.path == "/latest/api/token":
            self._give_token(request)
        elif request.command != "GET" or request.headers.get("X-aws-ec2-metadata-token") not in self._tokens:
            request.reply(401)
        else:
            item = self.items.get(request.path.removeprefix("/latest/meta-data/"))
            request.reply(404) if item is None else request.reply(200, item)

    def _give_token(self, request: _Handler) -> None:
        lifetime = request.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
        if request.command != "PUT":
            request.reply(405)
        elif "X-Forwarded-For" in request.headers:
            request.reply(403)
        elif not lifetime.isdigit() or not 1 <= int(lifetime) <= 21600:
            request.reply(400)
        else:
            token = uuid.uuid4().hex
            self._tokens.add(token)
            request.reply(200, token)


class GcpServer(MetadataServer):
    """Values with an ETag, and questions that are held until the value changes."""

    def __init__(self) -> None:
        super().__init__()
        self.flavor = "Google"
        self._values = {"preempted": "FALSE", "maintenance-event": "NONE"}
        self._etags = {"preempted": "a0", "maintenance-event": "b0"}

    def set(self, key: str, value: str) -> None:
        with self.changed:
            self._values[key] = value
            self._etags[key] = uuid.uuid4().hex[:16]
            self.changed.notify_all()

    def answer(self, request: _Handler) -> None:
        parts = urlsplit(request.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        key = parts.path.removeprefix("/computeMetadata/v1/instance/")
        if request.headers.get("Metadata-Flavor") != "Google" or "X-Forwarded-For" in request.headers:
            request.reply(403)
            return
        if key not in self._values:
            request.reply(404, Metadata_Flavor="Google")
            return
        with self.changed:
            if query.get("wait_for_change") == "true":
                last = query.get("last_etag", self._etags[key])
                self.changed.wait_for(
                    lambda: self._etags[key] != last or self.over.is_set(),
                    float(query.get("timeout_sec", PATIENCE)),
                )
            value, etag = self._values[key], self._etags[key]
        request.reply(200, value, Metadata_Flavor=self.flavor, ETag=etag)


class AzureServer(MetadataServer):
    """Scheduled Events, and the name of the machine."""

    def __init__(self) -> None:
        super().__init__()
        self.machine: str | None = "trainer_0"
        self.events: list[object] = []

    def announce(self, kind: str, seconds: float | None, *machines: str, status: str = "Scheduled") -> None:
        event = {
            "EventId": str(uuid.uuid4()),
            "EventType": kind,
            "ResourceType": "VirtualMachine",
            "Resources": list(machines or ["trainer_0"]),
            "EventStatus": status,
            "NotBefore": "" if seconds is None else formatdate(time.time() + seconds, usegmt=True),
            "Description": "",
            "EventSource": "Platform",
            "DurationInSeconds": -1,
        }
        self.events = [*self.events, event]

    def answer(self, request: _Handler) -> None:
        parts = urlsplit(request.path)
        if request.headers.get("Metadata") != "true" or "api-version" not in parse_qs(parts.query):
            request.reply(400, '{"error": "Bad request"}')
        elif parts.path == "/metadata/scheduledevents":
            request.reply(200, json.dumps({"DocumentIncarnation": len(self.events), "Events": self.events}))
        elif parts.path == "/metadata/instance/compute/name" and self.machine is not None:
            request.reply(200, self.machine)
        else:
            request.reply(404)
