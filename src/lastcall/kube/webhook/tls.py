"""The certificate that the webhook serves, and its renewal."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lastcall.kube.webhook import certificates
from lastcall.kube.webhook.certificates import Pair

# how often the files are checked; the kubelet itself takes a minute to update a changed Secret
LOOK_SECONDS = 10.0
_SPENT = 1 / 3  # the share of its lifetime that must be left


@dataclass(frozen=True)
class Own:
    """Signed here, with the authority in these files."""

    certificate: Path
    key: Path
    names: Sequence[str]
    hours: float = certificates.SERVING_HOURS

    def read(self) -> Pair:
        return certificates.read(self.certificate, self.key)

    def made(self, authority: Pair) -> Pair:
        return certificates.serving(authority, self.names, self.hours)

    def worn(self, served: Pair, now: float) -> bool:
        return served.ends - now < self.hours * 3600 * _SPENT


@dataclass(frozen=True)
class Given:
    """Issued and renewed by another program, such as cert-manager."""

    certificate: Path
    key: Path

    def read(self) -> Pair:
        return certificates.read(self.certificate, self.key)

    def made(self, pair: Pair) -> Pair:
        return pair

    def worn(self, served: Pair, now: float) -> bool:
        return False  # its issuer also issues the next one


class Serving:
    """Holds the context that connections are made with, and renews what is in it."""

    def __init__(self, source: Own | Given, clock: Callable[[], float] = time.time) -> None:
        self.source = source
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.clock = clock
        self._read = source.read()
        self.served = self._renewed()

    def look(self) -> str | None:
        """Renew it if its files have changed or it expires soon; returns what was done."""
        found = self.source.read()
        if found == self._read and not self.source.worn(self.served, self.clock()):
            return None
        why = "it was about to expire" if found == self._read else "its files have changed"
        before, self._read = self._read, found
        try:
            self.served = self._renewed()
        except BaseException:
            self._read = before  # half of a change: the certificate is new, its key not yet
            raise
        return why

    def _renewed(self) -> Pair:
        made = self.source.made(self._read)
        certificates.load(self.context, made)
        return made
