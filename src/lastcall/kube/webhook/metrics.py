"""What the webhook counts, in the text format of Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)  # seconds
_RESULTS = ("patched", "unchanged", "refused", "failed", "unreadable")


class Metrics:
    def __init__(self) -> None:
        self._results = Counter(dict.fromkeys(_RESULTS, 0))
        self._buckets = Counter[float]()
        self._seconds = 0.0
        self._gauges: list[tuple[str, str, Callable[[], float]]] = []

    def count(self, result: str, seconds: float) -> None:
        self._results[result] += 1
        self._seconds += seconds
        for bucket in _BUCKETS:
            self._buckets[bucket] += seconds <= bucket

    def gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        self._gauges.append((name, text, value))

    def page(self) -> str:
        requests, seconds = "lastcall_webhook_requests_total", "lastcall_webhook_request_seconds"
        total = self._results.total()
        lines = [f"# HELP {requests} Admission requests by result.", f"# TYPE {requests} counter"]
        lines += [f'{requests}{{result="{result}"}} {count}' for result, count in self._results.items()]
        lines += [f"# HELP {seconds} Time to answer, without TLS.", f"# TYPE {seconds} histogram"]
        lines += [f'{seconds}_bucket{{le="{bucket:g}"}} {self._buckets[bucket]}' for bucket in _BUCKETS]
        lines += [
            f'{seconds}_bucket{{le="+Inf"}} {total}',
            f"{seconds}_sum {self._seconds:.6f}",
            f"{seconds}_count {total}",
        ]
        for name, text, value in self._gauges:
            lines += [f"# HELP {name} {text}", f"# TYPE {name} gauge", f"{name} {value():g}"]
        return "\n".join(lines) + "\n"
