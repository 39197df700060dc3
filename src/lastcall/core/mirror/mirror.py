"""The mirror: a second copy of a run's checkpoints in an object store, or in a folder of another file system.

Local first. A checkpoint is committed in the directory as ever; then it is uploaded, its record last, so that
an incomplete copy never looks like a checkpoint (`upload`). Training does not wait for it, but a process that
was asked to stop does, for as long as it may live. On start the newest one is downloaded where the directory
has none that is as new (`download`): a directory that dies with its machine is enough.

    exp1/checkpoint-40/lastcall.json    ... the same names as in the directory (`remote_catalog`)
    exp1/.lastcall/leaving.json         a run was asked to stop and may still be uploading: the next one waits
                                        (`remote_departure`)
    exp1/.lastcall/run.json             which run it is, and which incarnation was the last one

Only one rank uploads: the lowest one that is alive, since all of them write into one directory. Where they do
not (`directories`), the committer does: its directory has the parts of all.
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
from lastcall.core.mirror.download import Downloader, never
from lastcall.core.mirror.remote_catalog import RemoteCatalog
from lastcall.core.mirror.remote_departure import RemoteDepartureNote
from lastcall.core.mirror.upload import Until, Uploader
from lastcall.core.sync.stopped import Stopped
from lastcall.events import EventLog
from lastcall.storage import files as storage

log = logging.getLogger("lastcall")
_RUN = f"{PRIVATE}/run.json"
_SMALL = 64 * 1024
_TAKE_BACK = 0.2, 5.0  # seconds that removing the departure note may take, at least and at most


_taken: dict[tuple[str, str], Path] = {}  # by mirror and run: the directory that this process uploads from


def reserve(url: str | None, root: Path, run: str = "") -> None:
    """A process that protects one run after the other, each in a directory of its own, must not give them one
    mirror: the second would find it full, and continue from the first one's checkpoints. `run`: its name,
    where it has one."""
    if url is None:
        return
    first = _taken.setdefault((url, run), root.resolve())
    if first != root.resolve():
        settings.fail(
            f"LASTCALL_MIRROR={url} is the mirror of the run in {first}, and this process protects another "
            f"one in {root.resolve()}: "
            "each would continue from the other's checkpoints. Give each its own mirror: "
            f"JITCheckpointConfig(mirror='{url}/{root.name}')"
        )


class Mirror:
    def __init__(
        self,
        url: str,
        catalog: Catalog,
        clock: clocks.Clock,
        events: EventLog,
        keep: Callable[[], Keep],
        keys: str | None = None,
    ) -> None:
        """`keys`: a folder with the credentials."""
        self.url = url
        self._catalog = catalog
        self._clock = clock
        self._remote = RemoteCatalog(url, catalog, keys, clock)
        self._downloader = Downloader(self._remote, catalog, clock, events)
        self._uploader = Uploader(self._remote, catalog, clock, events, keep)
        self._departure = RemoteDepartureNote(self._remote, clock)
        self.bring = self._downloader.bring
        self.bring_same = self._downloader.same
        self.has = self._remote.has
        self.forget = self._remote.forget
        self.seconds = self._uploader.seconds
        self.push = self._uploader.push
        # a notice has come: the next incarnation may start before this one has ended
        self.leaving = self._departure.say

    # ---- start ---------------------------------------------------------------------------------------------

    def take_over(self, stop_requested: Callable[[], bool], left: Callable[[], bool] = never) -> bool:
        """Before the directory is read: wait for an incarnation that still uploads, and download what the
        directory lacks. False if a notice came meanwhile, or has come to another rank (`left`)."""
        scheme, place = parsing.split_place(self.url)
        root = self._catalog.root.resolve()
        if scheme == "file" and Path("/", place).resolve().is_relative_to(root):
            settings.fail(
                f"LASTCALL_MIRROR: {self.url} is inside {root}, the directory that is to be mirrored. Name a "
                "folder elsewhere."
            )
        try:
            return download.interruptible(self._take_over, stop_requested, left, self._remote.say_silence)
        except Stopped:
            return False
        except errors.StorageRefused as error:
            settings.fail(f"LASTCALL_MIRROR: {error}")

    def _take_over(self, stop_requested: Callable[[], bool]) -> bool:
        if not self._departure.wait_for_the_one_before(stop_requested):
            return False
        self._become_the_same_run()
        self._remote.look()
        self._downloader.newest(stop_requested)
        return True

    def _become_the_same_run(self) -> None:
        """A new directory continues the run of the mirror; the directory of another run would have its state
        replaced by this one's."""
        path = self._catalog.private / "run.json"
        theirs = _identity(self._remote.place.read(_RUN, _SMALL))
        ours = _identity(_kept(path))
        if not theirs:
            return
        # with names, several runs may share a mirror
        if ours and ours["run"] != theirs["run"] and not self._catalog.run:
            settings.fail(
                f"LASTCALL_MIRROR: {self.url} holds another run than {self._catalog.root}. Give each run its "
                "own mirror: "
                f"export LASTCALL_MIRROR={self.url}/{self._catalog.root.name}"
            )
        if not ours or ours["incarnations"] < theirs["incarnations"]:
            storage.replace_small(path, json.dumps(theirs).encode())

    def note(
        self,
        run: str,
        incarnation: int,
        stop_requested: Callable[[], bool] = never,
        left: Callable[[], bool] = never,
    ) -> None:
        """Which incarnation this is. Also finds out now, and not at the first checkpoint, whether anything
        can be written there. Stopped if a notice comes meanwhile, or has come to another rank."""
        data = json.dumps({"run": run, "incarnations": incarnation}).encode()
        try:
            download.interruptible(
                lambda over: self._remote.place.write(_RUN, data),
                stop_requested,
                left,
                self._remote.say_silence,
            )
        except errors.StorageRefused as error:
            settings.fail(f"LASTCALL_MIRROR: {error}")

    # ---- between machines that share nothing else ----------------------------------------------------------

    def share(
        self,
        token: str,
        data: bytes,
        stop_requested: Callable[[], bool] = never,
        left: Callable[[], bool] = never,
    ) -> None:
        """Keys for the ranks that share no directory with this one: the mirror asks for credentials, and
        torch's store does not."""
        download.interruptible(
            lambda over: self._remote.place.write(_shared(token), data), stop_requested, left
        )

    def shared(
        self, token: str, stop_requested: Callable[[], bool] = never, left: Callable[[], bool] = never
    ) -> bytes | None:
        return download.interruptible(
            lambda over: self._remote.place.read(_shared(token), _SMALL), stop_requested, left
        )

    def unshare(self, token: str) -> None:
        """All have them."""
        try:
            download.interruptible(lambda over: self._remote.place.remove([_shared(token)]), never)
        except errors.LastcallError as error:
            log.warning(
                "Could not remove the keys of this incarnation from %s; remove them by hand: %s",
                self.url,
                error,
            )

    # ---- end -----------------------------------------------------------------------------------------------

    def settle(self, until: Until = upload.whenever) -> bool:
        """Wait until everything is uploaded, but not longer than `until`. Nothing is uploaded afterwards.
        False if the newest is not."""
        lost = self._uploader.settle(until)
        if lost:
            log.error(
                "The newest checkpoint is only in %s; it was not uploaded to %s: %s",
                self._catalog.root,
                self.url,
                lost,
            )
        least, most = _TAKE_BACK
        self._departure.unsay(max(least, min(most, until() - self._clock.now())))
        return not lost

    def copy_rest(self) -> None:
        """Training is over, and so is the script: files that it has written beside the checkpoints (`final/`,
        a model card) are uploaded too. Called when the interpreter ends: no thread can be started any
        more."""
        root = self._catalog.root
        try:
            for path in sorted(_beside(root)):
                self._remote.place.send(path, path.relative_to(root).as_posix(), threads=False)
                log.info("Uploaded %s to %s", path.relative_to(root), self.url)
        except (errors.LastcallError, OSError) as error:
            log.error("Could not upload everything in %s to %s: %s", root, self.url, error)


def _identity(data: bytes | None) -> dict[str, Any]:
    """The content of a run.json; empty where it is unusable."""
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
            folders[:] = [
                name for name in folders if name != PRIVATE and not re.match(r"checkpoint-\d+", name)
            ]
        found += [path for name in files if not (path := Path(folder, name)).is_symlink()]
    return found
