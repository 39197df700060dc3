"""Which cloud this machine is in. The firmware knows, and reading it is cheap; only if it is inconclusive are
the metadata servers queried."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from lastcall import clock as clocks
from lastcall.notices import polling
from lastcall.notices.cloud.metadata import Metadata
from lastcall.notices.polling import log

DMI = Path("/sys/class/dmi/id")
_AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"  # distinguishes Azure from any other Hyper-V


def by_firmware(folder: Path = DMI) -> str | None:
    """The name of the cloud; "" for a machine in none of the three; None if the firmware cannot be read (some
    sandboxes)."""
    vendor, product = _read(folder / "sys_vendor"), _read(folder / "product_name")
    if not vendor and not product:
        return None
    # the last one: Xen
    if "Amazon EC2" in (vendor, _read(folder / "board_vendor")) or "amazon" in _read(folder / "bios_version"):
        return "aws"
    if product.startswith("Google"):  # the vendor alone is no proof: Google also makes laptops
        return "gcp"
    if vendor == "Microsoft Corporation" and _read(folder / "chassis_asset_tag") == _AZURE_TAG:
        return "azure"
    return ""


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


class Detecting(polling.Poller):
    """Queries each candidate once, on a thread of its own since none may answer, and then uses the one that
    does.

    If none answers, `otherwise` is used: the firmware's cloud, on a machine where another one's endpoint is
    set.
    """

    name = "detect"
    title = "The search for a cloud"

    def __init__(
        self,
        candidates: Sequence[Metadata],
        otherwise: Metadata | None = None,
        clock: clocks.Clock | None = None,
    ) -> None:
        super().__init__(clock)
        self.candidates = list(candidates)
        self.otherwise = otherwise
        self.found: Metadata | None = None

    def begin(self) -> None:
        for candidate in self.candidates:
            candidate.client.open()

    def look(self) -> float:
        stopping = self._stopping
        found = self.found or self._search(stopping)
        if found is None or stopping.is_set():
            return polling.DONE
        self.found = found
        found.start(self._notify)
        if stopping.is_set():  # stop() was called in between
            found.stop()
        return polling.DONE

    def _search(self, stopping: threading.Event) -> Metadata | None:
        for candidate in self.candidates:
            if stopping.is_set():
                return None
            if candidate.probe():
                log.info("%s answers: watching it", candidate.title)
                return candidate
        log.debug(
            "no metadata server answered: this machine is in %s",
            self.otherwise.name if self.otherwise else "none of the clouds",
        )
        return self.otherwise

    def interrupt(self) -> None:
        for candidate in self.candidates:
            candidate.client.close()
        if self.found is not None:
            self.found.stop()
