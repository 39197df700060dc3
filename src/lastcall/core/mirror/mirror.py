"""The second place of a run's checkpoints: an object store, or a folder of another file system.

Local first. A checkpoint is committed in the directory as ever; then it is copied, its record last, so that nobody takes a copy that is
not whole for a checkpoint (`copying`). Training does not wait for it, but a process that was told to stop does, for as long as it may
live. On start the newest one is fetched where the directory has none that is as new (`fetching`): a directory that dies with its
machine is enough.

    exp1/checkpoint-40/lastcall.json    ... the same names as in the directory (`mirrored`)
    exp1/.lastcall/leaving.json         somebody was told to stop and may still be copying: whoever comes after it waits (`farewell`)
    exp1/.lastcall/run.json             which run it is, and which incarnation was the last one

Only one rank copies: the lowest one that is alive, since all of them write into one directory. Where they do not (`homes`), whoever has
committed: its directory has the parts of all.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lastcall import clock as clocks
from lastcall import errors, messages, parsing, settings
from lastcall.core.checkpoint.catalog import PRIVATE, Catalog
from lastcall.core.checkpoint.retention import Keep
from lastcall.core.mirror import download, upload
from lastcall.core.mirror.download import Fetching, never
from lastcall.core.mirror.remote_catalog import Mirrored
from lastcall.core.mirror.remote_departure import Farewell
from lastcall.core.mirror.upload import Copying, Until
from lastcall.core.sync.stopped import Stopped
from lastcall.events import EventLog
from lastcall.storage import files as storage

log = logging.getLogger("lastcall")
_RUN = f"{PRIVATE}/run.json"
_SMALL = 64 * 1024
_TAKE_BACK = 0.2, 5.0  # seconds that the last word to the next incarnation may take, at least and at most


_taken: dict[tuple[str, str], Path] = {}  # by place and run: the directory that this process copies from there


def reserve(url: str | None, root: Path, run: str = "") -> None:
    """A process that protects one run after the other, each in a directory of its own, must not give them one place: the second would
    find it full, and go on from the first one's checkpoints. `run`: its name, where it has one."""
    if url is None:
        return
    first = _taken.setdefault((url, run), root.resolve())
    if first != root.resolve():
        settings.fail(
            f"LASTCALL_MIRROR={url} is the place of the run in {first}, and this process protects another one in {root.resolve()}: "
            "each would go on from the other's checkpoints. Give each a place of its own: "
            f"JITCheckpointConfig(mirror='{url}/{root.name}')"
        )


class Mirror:
    def __init__(
        self, url: str, catalog: Catalog, clock: clocks.Clock, events: EventLog, keep: Callable[[], Keep], keys: str | None = None
    ) -> None:
        """`keys`: a folder with the credentials."""
        self.url = url
        self._catalog = catalog
        self._clock = clock
        self._there = Mirrored(url, catalog, keys, clock)
        self._fetching = Fetching(self._there, catalog, clock, events)
        self._copying = Copying(self._there, catalog, clock, events, keep)
        self._farewell = Farewell(self._there, clock)
        self.bring = self._fetching.bring
        self.bring_same = self._fetching.same
        self.has = self._there.has
        self.forget = self._there.forget
        self.seconds = self._copying.seconds
        self.push = self._copying.push
        self.leaving = self._farewell.say  # a notice has come: the next incarnation may be there before we are gone

    # ---- start -----------------------------------------------------------------------------------------------------------------

    def take_over(self, told: Callable[[], bool], left: Callable[[], bool] = never) -> bool:
        """Before the directory is looked at: wait for an incarnation that still copies, and fetch what the directory lacks. False if
        a notice came meanwhile, or has come to another rank (`left`)."""
        scheme, place = parsing.split_place(self.url)
        root = self._catalog.root.resolve()
        if scheme == "file" and Path("/", place).resolve().is_relative_to(root):
            settings.fail(
                f"LASTCALL_MIRROR: {self.url} is in {root}, whose checkpoints are to be copied there. Name a folder elsewhere."
            )
        try:
            return download.unless_told(self._take_over, told, left, self._there.say_silence)
        except Stopped:
            return False
        except errors.StorageRefused as error:
            settings.fail(f"LASTCALL_MIRROR: {error}")

    def _take_over(self, told: Callable[[], bool]) -> bool:
        if not self._farewell.wait_for_the_one_before(told):
            return False
        self._become_the_same_run()
        self._there.look()
        self._fetching.newest(told)
        return True

    def _become_the_same_run(self) -> None:
        """A new directory takes up the run that the place is of; one of another run would have its state replaced by this one's."""
        path = self._catalog.private / "run.json"
        theirs = _identity(self._there.place.read(_RUN, _SMALL))
        ours = _identity(_kept(path))
        if not theirs:
            return
        if ours and ours["run"] != theirs["run"] and not self._catalog.run:  # with names, several runs may share a place
            settings.fail(
                f"LASTCALL_MIRROR: {self.url} holds another run than {self._catalog.root}. Give each run a place of its own: "
                f"export LASTCALL_MIRROR={self.url}/{self._catalog.root.name}"
            )
        if not ours or ours["incarnations"] < theirs["incarnations"]:
            storage.replace_small(path, json.dumps(theirs).encode())

    def note(self, run: str, incarnation: int, told: Callable[[], bool] = never, left: Callable[[], bool] = never) -> None:
        """Which incarnation this is. Also finds out now, and not at the first checkpoint, whether anything can be written there.
        Stopped if a notice comes meanwhile, or has come to another rank."""
        data = json.dumps({"run": run, "incarnations": incarnation}).encode()
        try:
            download.unless_told(lambda over: self._there.place.write(_RUN, data), told, left, self._there.say_silence)
        except errors.StorageRefused as error:
            settings.fail(f"LASTCALL_MIRROR: {error}")

    # ---- between machines that share nothing else ------------------------------------------------------------------------------

    def share(self, token: str, data: bytes, told: Callable[[], bool] = never, left: Callable[[], bool] = never) -> None:
        """Keys for the ranks that have no directory in common with this one: the place asks for credentials, and torch's store does
        not."""
        download.unless_told(lambda over: self._there.place.write(_shared(token), data), told, left)

    def shared(self, token: str, told: Callable[[], bool] = never, left: Callable[[], bool] = never) -> bytes | None:
        return download.unless_told(lambda over: self._there.place.read(_shared(token), _SMALL), told, left)

    def unshare(self, token: str) -> None:
        """All have them."""
        try:
            download.unless_told(lambda over: self._there.place.remove([_shared(token)]), never)
        except errors.LastcallError as error:
            log.warning("The keys of this incarnation stay in %s until they are removed by hand: %s", self.url, error)

    # ---- end -------------------------------------------------------------------------------------------------------------------

    def settle(self, until: Until = upload.whenever) -> bool:
        """Wait until everything is copied, but not longer than `until`. Nothing is copied afterwards. False if the newest is not."""
        lost = self._copying.settle(until)
        if lost:
            log.error("The newest checkpoint is in %s only, and not in %s: %s", self._catalog.root, self.url, lost)
        least, most = _TAKE_BACK
        self._farewell.unsay(max(least, min(most, until() - self._clock.now())))
        return not lost

    def copy_rest(self) -> None:
        """Training is over, and so is the script: what it has written beside the checkpoints (`final/`, a model card) goes there too.
        Called when the interpreter ends: no thread can be started any more."""
        root = self._catalog.root
        try:
            for path in sorted(_beside(root)):
                self._there.place.send(path, path.relative_to(root).as_posix(), threads=False)
                log.info("Copied %s to %s", path.relative_to(root), self.url)
        except (errors.LastcallError, OSError) as error:
            log.error("Not everything in %s is copied to %s: %s", root, self.url, error)


def _identity(data: bytes | None) -> dict[str, Any]:
    """What a run.json says; empty where it says nothing that can be used."""
    body = messages.unpacked(data)
    whole = isinstance(body.get("run"), str) and type(body.get("incarnations")) is int
    return {"run": body["run"], "incarnations": body["incarnations"]} if whole else {}


def _shared(token: str) -> str:
    return f"{PRIVATE}/keys-{token}.json"


def _kept(path: Path) -> bytes | None:
    try:
        return storage.read_plain(path, _SMALL)
    except OSError:
        return None


def _beside(root: Path) -> list[Path]:
    """The plain files below the directory that are no part of a checkpoint, nor ours."""
    found: list[Path] = []
    for folder, folders, files in os.walk(root):
        if Path(folder) == root:
            folders[:] = [name for name in folders if name != PRIVATE and not re.match(r"checkpoint-\d+", name)]
        found += [path for name in files if not (path := Path(folder, name)).is_symlink()]
    return found
