"""A Kubernetes API server, asked over HTTPS with a token:

what the tests look at often. What a person would type goes through kubectl.
"""

from __future__ import annotations

import json
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

Object = dict[str, Any]
# seconds until a test gives up: two cores run the cluster, the pods and what builds beside them
PATIENCE = 180.0
_GROUPS = {
    "Job": "batch/v1",
    "Deployment": "apps/v1",
    "StatefulSet": "apps/v1",
    "PriorityClass": "scheduling.k8s.io/v1",
    "CustomResourceDefinition": "apiextensions.k8s.io/v1",
    "MutatingWebhookConfiguration": "admissionregistration.k8s.io/v1",
}


class Refused(Exception):
    """The server's own words, and its status code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class Api:
    def __init__(self, url: str, authority: Path, token: str) -> None:
        self._url = url
        self._context = ssl.create_default_context(cafile=str(authority))
        self._token = token

    def ask(self, method: str, path: str, body: object = None, kind: str = "application/json") -> Object:
        request = urllib.request.Request(
            f"{self._url}{path}", method=method, data=None if body is None else json.dumps(body).encode()
        )
        request.add_header("Authorization", f"Bearer {self._token}")
        request.add_header("Content-Type", kind)
        try:
            with urllib.request.urlopen(request, context=self._context, timeout=60) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            raise Refused(error.code, _message(error.read())) from None
        found: Object = json.loads(text) if text[:1] == b"{" else {"text": text.decode()}
        return found

    def answers(self) -> bool:
        try:
            return self.ask("GET", "/readyz")["text"] == "ok"
        except (OSError, Refused):
            return False

    def create(self, item: Object, namespace: str = "default", *, dry_run: bool = False) -> Object:
        version, plural = item["apiVersion"], plural_of(item["kind"])
        return self.ask(
            "POST", f"{_root(version, plural, namespace)}{'?dryRun=All' if dry_run else ''}", item
        )

    def get(self, kind: str, name: str, namespace: str = "default", version: str = "") -> Object:
        return self.ask(
            "GET", f"{_root(version or _GROUPS.get(kind, 'v1'), plural_of(kind), namespace)}/{name}"
        )

    def pods(self, selector: str, namespace: str = "default") -> list[Object]:
        """In the order of their creation."""
        found = self.ask("GET", f"/api/v1/namespaces/{namespace}/pods?labelSelector={quote(selector)}")[
            "items"
        ]
        return sorted(found, key=lambda pod: pod["metadata"]["creationTimestamp"])

    def log(self, pod: str, namespace: str = "default") -> str:
        """What its first container has said; nothing where there is none yet, or none any more."""
        try:
            return str(self.ask("GET", f"/api/v1/namespaces/{namespace}/pods/{pod}/log").get("text", ""))
        except Refused:
            return ""


def until(condition: Callable[[], bool], what: Callable[[], str], patience: float = PATIENCE) -> None:
    """Poll until it holds, no more often than a server is asked with ease.

    `what` is asked for at the end only, since it may read logs.
    """
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {what()}"
        time.sleep(0.2)


def plural_of(kind: str) -> str:
    """All kinds in these tests have the regular one."""
    return f"{kind.lower()}es" if kind.endswith("s") else f"{kind.lower()}s"


def _root(version: str, plural: str, namespace: str) -> str:
    scope = "" if plural in _CLUSTER_WIDE else f"/namespaces/{namespace}"
    return f"/{'apis' if '/' in version else 'api'}/{version}{scope}/{plural}"


_CLUSTER_WIDE = {
    "namespaces",
    "nodes",
    "priorityclasses",
    "customresourcedefinitions",
    "mutatingwebhookconfigurations",
    "clustertrainingruntimes",
}


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError):
        return body.decode(errors="replace")
