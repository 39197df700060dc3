"""The admission webhook as a process on one core, asked over TLS by connections that stay open, as an API
server does.

At a fixed rate a request counts from when it was due and not from when it could be sent: a server that stops
for a moment is slow for all that came meanwhile. Four of five objects have no annotation, as in a cluster
most have none.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.measure import Options
from bench.table import Listing

RATE = 200.0  # requests a second
_CONNECTIONS = 8
_SECONDS_A_ROUND = 4.0
_ANNOTATED = 5  # one of so many
_LARGE_BYTES = 5_000_000


@dataclass(frozen=True)
class Server:
    pid: int
    port: int
    context: ssl.SSLContext

    def connection(self) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=30, context=self.context)

    def cpu(self) -> float:
        """Seconds of processor time so far: what other work on the machine leaves as it is."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def _server(folder: Path, core: int) -> Iterator[Server]:
    from lastcall.kube.webhook import certificates

    pair = certificates.authority()
    (folder / "ca.crt").write_bytes(pair.certificate)
    (folder / "ca.key").write_bytes(pair.key)
    words = ["--host", "127.0.0.1", "--port", "0", "--name", "127.0.0.1", "--image", "lastcall:1"]
    files = ["--ca-cert", str(folder / "ca.crt"), "--ca-key", str(folder / "ca.key")]
    process = subprocess.Popen(
        [sys.executable, "-m", "lastcall", "kube", "webhook", *words, *files], stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    try:
        os.sched_setaffinity(process.pid, {core})
        port = json.loads(process.stderr.readline())["port"]
        drained = threading.Thread(target=process.stderr.read)  # a full pipe of log lines would stop it
        drained.start()
        yield Server(process.pid, port, ssl.create_default_context(cafile=str(folder / "ca.crt")))
    finally:
        process.kill()
        process.wait()
        drained.join()
        process.stderr.close()


def _review(annotated: bool, filling: int = 0) -> bytes:
    container = {
        "name": "train", "image": "registry/train:1", "command": ["python", "train.py"],
        "env": [{"name": f"VARIABLE_{number}", "value": "x" * 40} for number in range(20 + filling // 70)],
        "resources": {"limits": {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "1"}},
    }  # fmt: skip
    annotations = {"lastcall.dev/enabled": "true"} if annotated else {}
    spec = {"restartPolicy": "Never", "containers": [container, {"name": "proxy", "image": "proxy"}]}
    obj: Any = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "x", "annotations": annotations},
    }
    obj["spec"] = {"template": {"spec": spec}}
    request = {
        "uid": "705ab4f5-6393-11e8-b7cc-42010a800002",
        "operation": "CREATE",
        "namespace": "team",
        "object": obj,
    }
    return json.dumps(
        {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
    ).encode()


def _asked(connection: http.client.HTTPSConnection, body: bytes, annotated: bool) -> None:
    connection.request("POST", "/mutate", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    said = json.loads(answer.read())["response"]
    if answer.status != 200 or said["allowed"] is not True or ("patch" in said) is not annotated:
        raise AssertionError(f"a wrong answer: {answer.status} {sorted(said)}")


def _load(
    server: Server, seconds: float, due: Callable[[int, float], float | None]
) -> tuple[list[float], float]:
    """The seconds that each request took, and all of them together. `due`: when the nth of a connection is,
    or None at once."""
    bodies = {annotated: _review(annotated) for annotated in (True, False)}
    taken: list[float] = []
    failed: list[Exception] = []
    began = time.perf_counter() + 0.2  # connections are made by then

    def ask(lane: int) -> None:
        try:
            connection = server.connection()
            connection.connect()
            for number in range(1_000_000):
                start = due(number * _CONNECTIONS + lane, began) or max(time.perf_counter(), began)
                if start > began + seconds:
                    break
                time.sleep(max(start - time.perf_counter(), 0))
                annotated = (number + lane) % _ANNOTATED == 0
                _asked(connection, bodies[annotated], annotated)
                taken.append(time.perf_counter() - start)
            connection.close()
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=ask, args=(lane,)) for lane in range(_CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise AssertionError(str(failed[0])) from failed[0]
    return taken, time.perf_counter() - began


def webhook(folder: Path, options: Options) -> Listing:
    report = Listing("kube-webhook", "The admission webhook on one core, over TLS", ("what", "ms", ""))
    own = folder / "kube"
    own.mkdir()
    cores = sorted(os.sched_getaffinity(0))
    try:
        with _server(own, cores[0]) as server:
            os.sched_setaffinity(0, set(cores[1:]) or set(cores))
            _measure(report, server, options)
    except (AssertionError, OSError, ValueError) as error:
        report.failure = str(error).partition("\n")[0]
    finally:
        os.sched_setaffinity(0, set(cores))
    if len(cores) == 1:
        report.notes.append("Asked from the same core: there is only one.")
    return report


def _measure(report: Listing, server: Server, options: Options) -> None:
    _load(server, 1.0, lambda number, began: None)
    steady, _ = _load(server, _SECONDS_A_ROUND * options.rounds, lambda number, began: began + number / RATE)
    steady.sort()
    report.add(f"{RATE:.0f} requests a second: median", statistics.median(steady) * 1000, f"of {len(steady)}")
    report.add("  99th percentile", steady[int(len(steady) * 0.99)] * 1000, "the promise is 50 at most")
    report.add("  slowest", steady[-1] * 1000)
    before = server.cpu()
    fast, seconds = _load(server, _SECONDS_A_ROUND, lambda number, began: None)
    report.add(
        "as fast as they go: median",
        statistics.median(fast) * 1000,
        f"{len(fast) / seconds:.0f} requests a second",
    )
    report.add("  processor time of the server", (server.cpu() - before) / len(fast) * 1000, "a request")
    connection = server.connection()
    for annotated in (False, True):
        body, start = _review(annotated, _LARGE_BYTES), time.perf_counter()
        _asked(connection, body, annotated)
        what = "with" if annotated else "without"
        report.add(
            f"an object of {len(body) / 1e6:.1f} MB {what} annotation", (time.perf_counter() - start) * 1000
        )
    connection.close()
