"""Compute Engine: preemption, and host maintenance that stops the machine.

A preempted VM has up to 30 seconds until it is off. Maintenance that stops a VM is announced 60 seconds
ahead, or an hour where the VM has GPUs; the key does not tell which of the two, nor since when it is set, so
the shorter one is assumed.
"""

from __future__ import annotations

import urllib.parse

from lastcall import clock as clocks
from lastcall.notices.cloud.client import HttpAnswer
from lastcall.notices.cloud.metadata import PROBE_SECONDS, Metadata
from lastcall.notices.polling import Trouble, log

HOST = "metadata.google.internal"
# the same server; resolving its name off-cloud would query somebody else's name servers
ADDRESS = "169.254.169.254"

_PREEMPTED = "/computeMetadata/v1/instance/preempted"
_PREEMPTION_LEAD = 30.0
_MAINTENANCE = "/computeMetadata/v1/instance/maintenance-event"
_MAINTENANCE_LEAD = 60.0
_EVENTS = ("NONE", "MIGRATE_ON_HOST_MAINTENANCE", "TERMINATE_ON_HOST_MAINTENANCE")
_HEADERS = {"Metadata-Flavor": "Google"}


class Gcp(Metadata):
    name = "gcp"
    title = "The Compute Engine metadata server"
    interval = 1.0
    # seconds that the server holds a request for a change of `preempted`; then `maintenance-event` is read
    hold = 5.0

    def __init__(self, host: str = HOST, clock: clocks.Clock | None = None) -> None:
        super().__init__(f"http://{host}", clock)
        self._etag = ""

    def begin(self) -> None:
        super().begin()
        self._etag = ""

    def look(self) -> float:
        began = self.clock.now()
        held = bool(self._etag)
        self._look_for_preemption()
        self._look_for_maintenance()
        # A server that did not hold the request would be polled without a pause.
        return 0.0 if held and self.clock.now() - began >= self.interval else self.interval

    def ask_who(self) -> bool:
        return self._get(_PREEMPTED, PROBE_SECONDS).status == 200

    def _look_for_preemption(self) -> None:
        path, seconds = _PREEMPTED, self.client.seconds
        if self._etag:
            query = {"wait_for_change": "true", "timeout_sec": f"{self.hold:g}", "last_etag": self._etag}
            path, seconds = f"{path}?{urllib.parse.urlencode(query)}", self.client.seconds + self.hold
        self._etag = ""  # after a failure: query without waiting
        answer = self._get(path, seconds).expect()
        value = answer.text()
        if value not in ("TRUE", "FALSE"):
            raise Trouble("garbage", f"returned neither TRUE nor FALSE: {value[:60]!r}")
        self._etag = answer.headers.get("etag", "")
        if value == "TRUE" and self.new(_PREEMPTED):
            self.tell("Compute Engine preemption", self.clock.now() + _PREEMPTION_LEAD)

    def _look_for_maintenance(self) -> None:
        event = self._get(_MAINTENANCE).expect().text()
        if event not in _EVENTS:
            raise Trouble(
                "garbage",
                f"announced an unknown maintenance event, not one of {', '.join(_EVENTS)}: {event[:60]!r}",
            )
        if event == "NONE":
            self._told.difference_update(_EVENTS)  # the next one is news again
        elif self.new(event):
            if event.startswith("TERMINATE"):
                self.tell(f"Compute Engine host maintenance ({event})", self.clock.now() + _MAINTENANCE_LEAD)
            else:
                log.debug("Compute Engine live-migrates this machine (%s): nothing to do", event)

    def _get(self, path: str, seconds: float | None = None) -> HttpAnswer:
        answer = self.client.request("GET", path, _HEADERS, seconds=seconds)
        if answer.status == 200 and answer.headers.get("metadata-flavor") != "Google":
            raise Trouble("flavor", "returned no Metadata-Flavor: Google, so it is some other server")
        return answer
