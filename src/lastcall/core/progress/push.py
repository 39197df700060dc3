"""Reports a TrainJob's progress to Kubeflow Trainer, where its controller asked for it (KEP-2779, feature
gate TrainJobStatus).

One POST every few seconds at most, from a thread of its own; training, a save and the exit wait for none of
them: `close()` gives the last one two seconds. An unresponsive server is logged once, and asked less and less
often.

The protocol has a percentage, seconds and named metrics. What it has no field for (the state of the run, its
checkpoint, what it was resumed from) goes along as metrics. Discarded: `urllib.request`, which follows a
redirect with our token and asks a proxy that the pod may have for the internet; the SDK's own function, since
images for training do not have the SDK.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import ssl
import threading
import time
import urllib.parse
from collections.abc import Mapping
from pathlib import Path

from lastcall.core.progress.report import ProgressReport
from lastcall.settings import StatusServer

log = logging.getLogger("lastcall")
INTERVAL_SECONDS = 5.0  # the controller's own clients send no more often
_SLOWEST_SECONDS = 60.0  # between two attempts, while the server does not answer
_REQUEST_SECONDS = 5.0
_CLOSE_SECONDS = 2.0
_MOST_METRICS = 256  # more of them, and the controller refuses the whole


class StatusPush:
    """Of one session, on rank 0. `close()` says how it ended."""

    def __init__(
        self, server: StatusServer, report: ProgressReport, *, interval: float = INTERVAL_SECONDS
    ) -> None:
        self._server = server
        self._report = report
        self._interval = interval
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._said: dict[str, object] = {}
        self._failures = 0

    def open(self) -> None:
        self._thread = threading.Thread(target=self._serve, name="lastcall-status", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """The session has ended. A process that is about to be killed has no more time than this."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)

    def _serve(self) -> None:
        while not self._closing.wait(self._pause()):
            self._tell()
        self._tell()

    def _pause(self) -> float:
        return min(
            self._interval * float(1 << min(self._failures, 10)), max(_SLOWEST_SECONDS, self._interval)
        )

    def _tell(self) -> None:
        """Send what is new. A failure is a warning the first time, and never a reason to stop."""
        try:
            status = status_of(self._report.document())
            if status == self._said:
                return
            _post(self._server, {"trainerStatus": {**status, "lastUpdatedTime": _now()}})
            self._said, self._failures = status, 0
        except Exception as error:
            self._failures += 1
            level = logging.WARNING if self._failures == 1 else logging.DEBUG
            log.log(
                level,
                "Could not report progress to Kubeflow (%s: %s); training continues",
                type(error).__name__,
                error,
            )


def status_of(document: Mapping[str, object]) -> dict[str, object]:
    """A report in the format of KEP-2779: unknown values are left out, and metrics are text."""
    ours: dict[str, object] = {
        "current_step": document["currentStep"],
        "total_steps": document["totalSteps"],
        "current_epoch": document["currentEpoch"],
        "total_epochs": document["totalEpochs"],
        "steps_per_second": document["steps_per_second"],
        "state": document["state"],
        "incarnation": document["incarnation"],
        "resumed_from": document["resumed_from"],
        "notice": document["notice"],
    }
    checkpoint = document["checkpoint"]
    for name, value in checkpoint.items() if isinstance(checkpoint, dict) else ():
        ours[f"checkpoint_{name}"] = value
    theirs: dict[str, object] = {}
    for group in (document["trainMetrics"], document["evalMetrics"]):
        theirs.update(group if isinstance(group, dict) else {})
    # ours come first, so that they are not cut off, and keep their meaning
    metrics = {**ours, **theirs, **ours}
    known = [{"name": name, "value": str(value)} for name, value in metrics.items() if value is not None]
    status = {
        name: document[name]
        for name in ("progressPercentage", "estimatedRemainingSeconds")
        if document[name] is not None
    }
    return {**status, "metrics": known[:_MOST_METRICS]}


def _post(server: StatusServer, body: dict[str, object]) -> None:
    url = urllib.parse.urlsplit(server.url)
    # each time: the kubelet replaces it before it expires
    token = Path(server.token_file).read_text().strip()
    connection: http.client.HTTPConnection
    if url.scheme == "https":
        context = ssl.create_default_context(cafile=server.ca_file)
        connection = http.client.HTTPSConnection(url.netloc, timeout=_REQUEST_SECONDS, context=context)
    else:
        connection = http.client.HTTPConnection(url.netloc, timeout=_REQUEST_SECONDS)
    with contextlib.closing(connection):
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        path = f"{url.path or '/'}?{url.query}" if url.query else url.path or "/"
        connection.request("POST", path, json.dumps(body, allow_nan=False).encode(), headers)
        answer = connection.getresponse()
        if answer.status >= 300:
            raise OSError(f"{server.url} answered {answer.status} {answer.reason}")


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
