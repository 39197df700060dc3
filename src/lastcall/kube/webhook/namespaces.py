"""The annotations of namespaces, followed through the API server: a list, then a watch, on a thread of its
own.

The service account may get, list and watch namespaces and nothing else. While the API server is unreachable,
the last known annotations apply; before the first answer, only the objects' own.
"""

from __future__ import annotations

import http.client
import json
import logging
import ssl
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lastcall.kube.inject import annotations as noted
from lastcall.kube.inject.draft import at

log = logging.getLogger("lastcall.kube")
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_PATH = "/api/v1/namespaces"
_WATCH_SECONDS = 240
_ANSWER_SECONDS = 2.0  # a webhook has only a few seconds in all
_BACKOFF_SECONDS = (1.0, 30.0)


class ApiError(Exception):
    """The API server did not answer as it should."""


@dataclass(frozen=True)
class Api:
    """Address and credentials of the API server. The token is reread each time: the kubelet renews it."""

    url: str
    token: Path | None = None
    ca: Path | None = None

    @contextmanager
    def get(self, path: str, seconds: float) -> Iterator[http.client.HTTPResponse]:
        with closing(self._connection(seconds)) as connection:
            headers = {"Accept": "application/json"}
            if self.token is not None:
                headers["Authorization"] = f"Bearer {self.token.read_text(encoding='ascii').strip()}"
            connection.request("GET", path, headers=headers)
            response = connection.getresponse()
            if response.status != 200:
                raise ApiError(f"{path}: {response.status} {response.reason}")
            yield response

    def _connection(self, seconds: float) -> http.client.HTTPConnection:
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme == "http":
            return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=seconds)
        context = ssl.create_default_context(cafile=None if self.ca is None else str(self.ca))
        return http.client.HTTPSConnection(parts.hostname or "", parts.port, timeout=seconds, context=context)


def in_cluster(environ: Mapping[str, str], account: Path = ACCOUNT) -> Api | None:
    """From the files that the kubelet puts into every pod; None outside of a pod."""
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not (account / "token").exists():
        return None
    return Api(
        f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
        account / "token",
        account / "ca.crt",
    )


class Namespaces:
    def __init__(self, api: Api | None) -> None:
        self.api = api
        self.synced = False  # whether the watch is established
        self._known: dict[str, dict[str, Any]] = {}
        self._tried = threading.Event()

    def start(self) -> None:
        if self.api is None:
            self._tried.set()
        else:
            threading.Thread(target=self._follow, name="lastcall-namespaces", daemon=True).start()

    @property
    def tried(self) -> bool:
        """Whether the first list has arrived or failed."""
        return self._tried.is_set()

    def known(self, name: str) -> Mapping[str, Any] | None:
        """Its lastcall annotations; None if this namespace was never seen."""
        return self._known.get(name)

    def ask(self, name: str) -> Mapping[str, Any]:
        """Reads a namespace that is too new for the watch. Empty if there is no answer."""
        if self.api is None or not name:
            return {}
        try:
            with self.api.get(f"{_PATH}/{urllib.parse.quote(name, safe='')}", _ANSWER_SECONDS) as response:
                return self._take(json.load(response))
        except (OSError, ValueError, ApiError, http.client.HTTPException) as error:
            log.warning(
                "could not read namespace %r: using only the object's own annotations: %s", name, error
            )
            return {}

    def _follow(self) -> None:
        pause = _BACKOFF_SECONDS[0]
        while True:
            try:
                version = self._list()
                self.synced, pause = True, _BACKOFF_SECONDS[0]
                self._tried.set()
                self._watch(version)
            except Exception as error:
                if self.synced or not self._tried.is_set():
                    log.warning(
                        "could not watch namespaces: keeping their last known annotations: %s: %s",
                        type(error).__name__,
                        error,
                    )
                self.synced = False
                self._tried.set()
                time.sleep(pause)
                pause = min(2 * pause, _BACKOFF_SECONDS[1])

    def _list(self) -> str:
        assert self.api is not None
        with self.api.get(_PATH, _ANSWER_SECONDS * 5) as response:
            found = json.load(response)
        before = set(self._known)
        for item in at(found, ("items",)) or []:
            self._take(item)
            before.discard(at(item, ("metadata", "name")))
        for name in before:
            self._known.pop(name, None)
        return str(at(found, ("metadata", "resourceVersion")))

    def _watch(self, version: str) -> None:
        """Watches until the API server ends the request after the requested time."""
        assert self.api is not None
        query = urllib.parse.urlencode(
            {"watch": "1", "resourceVersion": version, "timeoutSeconds": str(_WATCH_SECONDS)}
        )
        with self.api.get(f"{_PATH}?{query}", _WATCH_SECONDS + 30.0) as response:
            for line in response:
                event = json.loads(line)
                if event.get("type") == "ERROR":
                    raise ApiError(str(at(event, ("object", "message"))))
                if event.get("type") == "DELETED":
                    self._known.pop(at(event, ("object", "metadata", "name")), None)
                else:
                    self._take(event.get("object"))

    def _take(self, namespace: Any) -> Mapping[str, Any]:
        found = noted.ours(at(namespace, ("metadata", "annotations")))
        name = at(namespace, ("metadata", "name"))
        if isinstance(name, str):
            self._known[name] = found
        return found
