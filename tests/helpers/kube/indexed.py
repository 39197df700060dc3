"""What an indexed Job gives its pods, on a Kubernetes that has none yet (they came with 1.21).

The Job, its controller and its pods are the cluster's own: one Job with as many pods at a time as it wants
completions, all from one template. What the older controller lacks is a number for each: here an admission
webhook gives it to a pod when it is created. It is the smallest that no pod of the Job has which runs or has
succeeded, and it is found where the newer controller puts it: in the annotation, the host name and
JOB_COMPLETION_INDEX.
"""

from __future__ import annotations

import base64
import contextlib
import http.server
import json
import ssl
import threading
import time
from collections.abc import Iterator

from helpers.kube.api import Api, Object, until
from helpers.kube.cluster import Cluster
from helpers.servers.http_server import Served
from lastcall.kube.webhook import certificates

INDEX = "batch.kubernetes.io/job-completion-index"
FIELD = f"metadata.annotations['{INDEX}']"
COMPLETIONS = "tests.lastcall.dev/indexed-completions"  # of the template of a Job that is to be indexed
# they are asked in the order of their names: what a controller does comes before them all
_NAME = "a-indexed-jobs.tests.lastcall.dev"
_UNSEEN = 3.0  # seconds


def job(metadata: Object, template: Object, completions: int) -> Object:
    template["metadata"].setdefault("annotations", {})[COMPLETIONS] = str(completions)
    spec = {"completions": completions, "parallelism": completions, "template": template}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def index_of(pod: Object) -> int:
    return int(pod["metadata"]["annotations"][INDEX])


@contextlib.contextmanager
def served(cluster: Cluster) -> Iterator[None]:
    """For as long as the block lasts, pods of such Jobs get their numbers."""
    authority = certificates.authority()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificates.load(context, certificates.serving(authority, [cluster.outside]))
    with Served(_handler(_Numbers(cluster.api)), context, cluster.outside) as server:
        cluster.api.create(_configuration(server.address, authority))
        try:
            until(lambda: _asked(cluster.api), lambda: "the API server to ask for numbers")
            yield
        finally:
            cluster.kubectl("delete", "mutatingwebhookconfiguration", _NAME)


def _asked(api: Api) -> bool:
    """Some time after it was registered."""
    metadata = {"name": "asked", "labels": {"job-name": "asked"}, "annotations": {COMPLETIONS: "1000"}}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {"containers": [{"name": "it", "image": "it"}]},
    }
    return INDEX in api.create(pod, dry_run=True)["metadata"]["annotations"]


class _Numbers:
    """Those that were given out: a pod can be seen only some time after that."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._lock = threading.Lock()
        self._given: dict[tuple[str, int], float] = {}

    def patch(self, pod: Object, namespace: str) -> list[Object]:
        metadata = pod["metadata"]
        wanted = metadata.get("annotations", {}).get(COMPLETIONS)
        if wanted is None or INDEX in metadata["annotations"]:
            return []
        owner = metadata["labels"]["job-name"]
        number = self._next(owner, namespace, int(wanted))
        added = {**metadata["annotations"], INDEX: str(number)}
        changes = {"/metadata/annotations": added, "/spec/hostname": f"{owner}-{number}"}
        variable = {"name": "JOB_COMPLETION_INDEX", "valueFrom": {"fieldRef": {"fieldPath": FIELD}}}
        for place, container in enumerate(pod["spec"]["containers"]):
            changes[f"/spec/containers/{place}/env"] = [*container.get("env", ()), variable]
        return [{"op": "add", "path": path, "value": value} for path, value in changes.items()]

    def _next(self, owner: str, namespace: str, completions: int) -> int:
        with self._lock:
            taken = {index_of(pod) for pod in self._api.pods(f"job-name={owner}", namespace) if _counts(pod)}
            now = time.monotonic()
            taken |= {
                number
                for (whose, number), since in self._given.items()
                if whose == owner and now < since + _UNSEEN
            }
            number = min(set(range(completions)) - taken)
            self._given[owner, number] = now
            return number


def _counts(pod: Object) -> bool:
    return pod["status"].get("phase") == "Succeeded" or not (
        pod["status"].get("phase") == "Failed" or pod["metadata"].get("deletionTimestamp")
    )


def _handler(numbers: _Numbers) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["request"]
            patch = json.dumps(numbers.patch(request["object"], request["namespace"])).encode()
            response = {
                "uid": request["uid"],
                "allowed": True,
                "patchType": "JSONPatch",
                "patch": base64.b64encode(patch).decode(),
            }
            body = json.dumps(
                {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}
            ).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing: what goes wrong is in the events of the Job."""

    return Handler


def _configuration(address: str, authority: certificates.Pair) -> Object:
    webhook = {
        "name": _NAME,
        "clientConfig": {"url": f"{address}/", "caBundle": base64.b64encode(authority.certificate).decode()},
        "rules": [
            {"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["CREATE"]}
        ],
        "objectSelector": {"matchExpressions": [{"key": "job-name", "operator": "Exists"}]},
        "failurePolicy": "Fail",
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    }
    version, kind = "admissionregistration.k8s.io/v1", "MutatingWebhookConfiguration"
    return {"apiVersion": version, "kind": kind, "metadata": {"name": _NAME}, "webhooks": [webhook]}
