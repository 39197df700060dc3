"""Azure: Scheduled Events.

Each is announced ahead: Preempt at least 30 seconds, Redeploy 10 minutes, Reboot 15 minutes, Terminate 5 to
15 minutes as configured, and a machine on failing hardware up to a week. The notice of a distant event is
delayed, so that the time until then is used. lastcall never approves events: that would bring the end
forward.
"""

from __future__ import annotations

from collections.abc import Mapping

from lastcall import clock as clocks
from lastcall.notices import polling
from lastcall.notices.cloud.client import HttpAnswer
from lastcall.notices.cloud.metadata import PROBE_SECONDS, Metadata
from lastcall.notices.polling import Trouble, log

BASE = "http://169.254.169.254"
LEAD = 300.0  # how long before a more distant event its notice is given, in seconds

_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_HEADERS = {"Metadata": "true"}
_STOPS = ("Preempt", "Terminate", "Reboot", "Redeploy")
_SLOW_START = 150.0  # the service is enabled by its first request, whose answer may take two minutes


class Azure(Metadata):
    name = "azure"
    title = "The Azure metadata service"
    interval = 1.0

    def __init__(self, base: str = BASE, *, lead: float = LEAD, clock: clocks.Clock | None = None) -> None:
        super().__init__(base, clock)
        self._lead = lead
        self._machine: str | None = None
        self._patient_until = 0.0

    def begin(self) -> None:
        super().begin()
        self._patient_until = self.clock.now() + _SLOW_START

    def look(self) -> float:
        try:
            body = self._get(_EVENTS).mapping()
        except Trouble as error:
            if error.kind == "silent" and self.clock.now() < self._patient_until:
                log.debug("%s %s; its first answer may take two minutes", self.title, error)
                return self.interval
            raise
        self._patient_until = 0.0
        events = body.get("Events")
        if not isinstance(events, list):
            raise Trouble("garbage", "returned no list of events")
        for event in events:
            if not isinstance(event, dict):
                raise Trouble("garbage", f"announced an invalid event: {str(event)[:60]!r}")
            self._consider(event)
        return self.interval

    def ask_who(self) -> bool:
        self._machine = self._get(_NAME, PROBE_SECONDS).text()
        return True

    def _consider(self, event: Mapping[str, object]) -> None:
        kind = event.get("EventType")
        news = (
            str(event.get("EventId")),
            str(kind),
            str(event.get("EventStatus")),
            str(event.get("NotBefore")),
        )
        if news in self._told or not self._concerns_us(event):
            return
        if kind not in _STOPS:
            if self.new(news):  # Freeze: a pause of seconds, after which everything continues
                log.debug("Azure announced %s: nothing to do", kind)
            return
        started = event.get("EventStatus") == "Started"
        moment = None if started else polling.instant(event.get("NotBefore"))
        if moment is not None and kind != "Preempt" and moment - self.clock.wall() > self._lead:
            if self.new(("ahead", *news)):
                log.warning(
                    "Azure announced %s for %s: training continues until %.0f s before "
                    "(LASTCALL_AZURE_LEAD_SECONDS)",
                    kind,
                    polling.shown(moment),
                    self._lead,
                )
            return
        self.new(news)
        when = (
            "now"
            if started
            else f"not before {event.get('NotBefore')}"
            if moment is not None
            else "at an unknown time"
        )
        deadline = (
            self.clock.now() if started else None if moment is None else polling.monotonic(self.clock, moment)
        )
        self.tell(f"Azure {kind} ({when})", deadline)

    def _concerns_us(self, event: Mapping[str, object]) -> bool:
        """Every machine of a set gets the events of all. If our name is unknown, each event is treated as
        ours."""
        resources = event.get("Resources")
        if not isinstance(resources, list) or not resources:
            return True
        if self._machine is None:
            try:
                self._machine = self._get(_NAME).text()
            except Trouble as error:
                self.warn(
                    "name",
                    "%s %s, so the name of this machine is unknown: every event is treated as ours",
                    self.title,
                    error,
                )
                return True
        return not self._machine or any(
            str(resource).lower() == self._machine.lower() for resource in resources
        )

    def _get(self, path: str, seconds: float | None = None) -> HttpAnswer:
        return self.client.request("GET", path, _HEADERS, seconds=seconds).expect()
