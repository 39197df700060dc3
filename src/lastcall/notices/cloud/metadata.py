"""Common code for the three clouds: a metadata server that is polled."""

from __future__ import annotations

from collections.abc import Hashable

from lastcall import clock as clocks
from lastcall.notices import polling
from lastcall.notices.cloud.client import Client

PROBE_SECONDS = 1.0


class Metadata(polling.Poller):
    def __init__(self, base: str, clock: clocks.Clock | None = None) -> None:
        super().__init__(clock)
        self.client = Client(base)
        self._told: set[Hashable] = set()

    def begin(self) -> None:
        self._told.clear()
        self.client.open()

    def interrupt(self) -> None:
        self.client.close()

    def new(self, news: Hashable) -> bool:
        """Whether this is new. A server repeats an announcement for as long as it is valid."""
        if news in self._told:
            return False
        self._told.add(news)
        return True

    def probe(self) -> bool:
        """One short request: is this machine in this cloud?"""
        try:
            return self.ask_who()
        except polling.Trouble as error:
            polling.log.debug("%s %s: not in this cloud", self.title, error)
            return False

    def ask_who(self) -> bool:
        raise NotImplementedError
