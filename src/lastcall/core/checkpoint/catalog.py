"""The committed checkpoints of a directory: which there are, which may be removed, and the directory's
housekeeping.

runs/exp1/checkpoint-1347/        committed: the record is there
runs/exp1/checkpoint-1347.damaged-0/   set aside: its digests did not hold
runs/exp1/.lastcall/staging/      under construction; never looked at, removed on start
runs/exp1/.lastcall/trash/        pruned; its files become spare space
runs/exp1/.lastcall/mirroring/    waits to be uploaded (`mirror`)
runs/exp1/.lastcall/spare/        space kept ready; spare-2/ is that of rank 2
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lastcall import clock as clocks
from lastcall import errors, settings
from lastcall.core.checkpoint import commit, filenames, retention, run_directory
from lastcall.core.checkpoint import record as records
from lastcall.core.checkpoint.record import Entry, Record
from lastcall.core.checkpoint.retention import Keep
from lastcall.core.process import identity
from lastcall.storage import errnos, folders, locks
from lastcall.storage import files as storage
from lastcall.storage.locks import Lock
from lastcall.storage.spare import SparePool

log = logging.getLogger("lastcall")
_CHECKPOINT = re.compile(r"checkpoint-\d+(\.replaced-\d+)?")
PRIVATE = ".lastcall"
MIRRORING = "mirroring"
_LONGEST_OWNER = 1000
_ORPHANS = 1.0  # seconds in which a process that has just been forked closes what it inherited
_LIKE_ONE = re.compile(r"checkpoint-(\d{1,18})((?:\.replaced-\d+)?(?:\.damaged-\d+)?)$")
_held: dict[Path, int] = {}  # the directories that this process (a fork has another number) holds


@dataclass(frozen=True)
class Owner:
    """The process that holds the lock, as far as it is known."""

    pid: str = ""
    machine: str = ""  # the name that people use
    host: str = ""  # as Process does

    def __str__(self) -> str:
        return f"process {self.pid or '(unknown)'}" + (f" on {self.machine}" if self.machine else "")


class Catalog:
    """One directory of checkpoints. Only the process that holds its lock changes it; other ranks of a run
    write into its staging."""

    def __init__(self, root: Path, files: storage.Files, rank: int = 0) -> None:
        root = root.absolute()  # at once: a script may change its working directory at any time
        self.root = root
        self.private = root / PRIVATE
        self.staging = self.private / "staging"
        self.trash = self.private / "trash"
        mine = f"-{rank}" if rank else ""
        self.preparing = self.private / f"preparing{mine}"  # a spare that is being written
        self.files = files
        self._rank = rank
        self.spares = SparePool(self.private / f"spare{mine}", files)
        self._lock: Lock | None = None
        self._device: int | None = None  # of the file system that the directory was on when it was opened
        self.without_locks = False  # the file system has none: having it proves nothing
        self.run = ""  # where the run is known by name: checkpoints of another are not ours
        self.keep = Keep()  # what rotation keeps; an adapter may change it at any time

    def pool(self, rank: int) -> SparePool:
        """The spare space for the files of a rank."""
        return (
            self.spares
            if rank == self._rank
            else SparePool(self.private / (f"spare-{rank}" if rank else "spare"), self.files)
        )

    @property
    def held(self) -> bool:
        """Whether this process holds the lock."""
        return self._lock is not None and self._lock.held

    def make(self) -> None:
        """Make the directory, as any rank may."""
        self._device = run_directory.make(self.root, self.private)

    def make_again(self) -> bool:
        """The directory, or our part of it, may have been removed or renamed under the run. Returns whether
        it had to be made again. SaveError where its file system is gone: what was written under the empty
        mount point would be lost with it."""
        # By its name: some file systems (FUSE) give a file a new number at each look. Whether another
        # incarnation has taken the directory since is known from the token (`ownership`).
        unlocked = self.held and not os.path.lexists(self.private / "lock")
        if self._device is None or (self.private.is_dir() and not unlocked):
            return False
        run_directory.check_device(self.root, self._device)
        log.warning(
            "%s was removed or renamed during the run; it has been recreated, and this run saves there",
            self.private,
        )
        self.make()
        if unlocked:
            self.close()
            if not self.try_lock():
                raise errors.SaveError(
                    f"{self.root} was recreated by {self.owner()}, which holds it now: nothing is saved there"
                )
        return True

    def prepare(self) -> None:
        """Make the directory, before the first try_lock()."""
        self.make()
        # POSIX locks do not keep out a second run in this process, and opening the file again would release
        # the first one's.
        if _held.get(self.root.resolve()) == os.getpid():
            raise errors.BusyError(
                f"{self.root} is already in use by this process: give each run its own directory."
            )

    def open(self, clock: clocks.Clock, patience: float = 10.0) -> None:
        """Make the directory and lock it, for callers that are not an incarnation (those wait longer:
        `takeover`)."""
        self.prepare()
        give_up = clock.now() + patience
        while not self.try_lock():
            if clock.now() >= give_up:
                raise self.busy()
            clock.sleep(0.1)

    def busy(self) -> errors.BusyError:
        owner = self.owner()
        return errors.BusyError(
            f"{self.root} is in use by {owner}. Two runs cannot share a directory: wait for it, "
            f"stop it (kill {owner.pid or 'PID'}), or give this run its own directory."
        )

    def owner(self) -> Owner:
        """The process that took the lock last."""
        try:
            return Owner(*(self.private / "lock").read_text(errors="replace")[:_LONGEST_OWNER].split()[:3])
        except OSError:
            return Owner()

    def try_lock(self) -> bool:
        """Take the lock if it is free. Where the file system has no locks, it counts as taken, with a
        warning."""
        path = self.private / "lock"
        new = not path.exists()
        try:
            fd = _lock_file(path)
        except OSError as error:
            if not isinstance(error, PermissionError) and error.errno != errno.EROFS:
                raise
            what = (
                f"{path} cannot be opened ({errnos.named(error)}), and without the lock two runs could use "
                "the directory at once"
            )
            settings.fail(f"{what}. {run_directory.whose(path, error)}")
        try:
            if new:
                run_directory.share(self.root, path)
            if not locks.take(fd) and not self._let_go_by_the_dead(fd):
                os.close(fd)
                return False
        except OSError as error:
            log.warning(
                "%s cannot be locked (%s): make sure that no other run uses it", self.root, error.strerror
            )
            self.without_locks = True
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()} {os.uname().nodename} {identity.Process.own().host}".encode(), 0)
        self._lock = Lock(fd)
        _held[self.root.resolve()] = os.getpid()
        return True

    def _let_go_by_the_dead(self, fd: int) -> bool:
        """A child that was forked just before its parent was killed has the lock until it has run for a
        moment."""
        owner = self.owner()
        if (
            owner.host != identity.Process.own().host
            or not owner.pid.isdecimal()
            or os.path.exists(f"/proc/{owner.pid}")
        ):
            return False
        until = time.monotonic() + _ORPHANS
        while not locks.take(fd):
            if time.monotonic() >= until:
                return False
            time.sleep(0.01)
        return True

    def close(self) -> None:
        if self._lock is not None:
            if self._lock.held:
                _held.pop(self.root.resolve(), None)
            self._lock.release()
            self._lock = None

    def entries(self) -> list[Entry]:
        """The committed checkpoints of this run, newest first. Unreadable ones are left out; `clean` deals
        with them."""
        return [entry for entry in self._all() if not self.run or entry.record.run == self.run]

    def foreign(self) -> list[Entry]:
        """Those of other runs in this directory."""
        return [entry for entry in self._all() if self.run and entry.record.run != self.run]

    def _all(self) -> list[Entry]:
        found = []
        for path in self._folders():
            try:
                found.append(Entry(path, records.read(path)))
            except errors.UncheckedError as error:
                raise type(error)(f"{path}: {error}") from error
            except errors.CheckpointError:
                continue
        return sorted(found, key=lambda entry: entry.record.recency, reverse=True)

    def find(self, save: str) -> Entry | None:
        """What came of the save that the ranks called so, if it is among the newest."""
        try:
            return next((entry for entry in self.entries()[:4] if entry.record.save == save), None)
        except errors.UncheckedError:  # the caller asks again
            return None

    def clean(self) -> list[str]:
        """Remove what is incomplete, set aside what is damaged. Returns what was done, a sentence each."""
        done = []
        for leftover in (self.private / MIRRORING, self.staging, self.trash, *self.private.glob("scratch-*")):
            if os.path.lexists(leftover):
                self._throw_away(leftover)
        for leftover in (self.preparing, *self.private.glob("preparing-*")):
            with contextlib.suppress(OSError):
                self.files.unlink(leftover)
        for path in self._folders():
            if os.path.lexists(path / records.SENTINEL):
                self._discard(path)
                done.append(f"removed {path.name}: it was never completed")
                continue
            try:
                if not self._has_record(path):
                    continue  # not ours, or gone: `passed_over` names it
                records.read(path)
            except errors.UncheckedError as error:
                raise type(error)(f"{path}: {error}") from error
            except errors.CheckpointError as error:
                done.append(self.set_aside(path, str(error)))
        return done

    def _has_record(self, path: Path) -> bool:
        try:
            errnos.reading(lambda: os.lstat(path / records.NAME), f"{records.NAME} cannot be read")
        except errors.UncheckedError:
            raise
        except errors.CheckpointError:
            return False
        return True

    def set_aside(self, path: Path, why: str) -> str:
        """Keep a damaged checkpoint under another name; it is never deleted. Where it cannot be moved it
        stays and is skipped: the run can still continue from an older one."""
        new = storage.first_free(self.root, (f"{path.name}.damaged-{n}" for n in range(10_000)))
        try:
            folders.move(self.files, path, new)
            self.files.sync_directory(self.root)
        except OSError as error:
            stays = f"it stays where it is, since it cannot be moved ({errnos.named(error)})"
            return f"{path.name} is damaged and was skipped; {stays}: {why}"
        return f"set {path.name} aside as {new.name}: {why}"

    def passed_over(self) -> list[tuple[int, str]]:
        """What looks like a checkpoint of this directory but is not resumed from: its step, and a few words
        that name it."""
        found = []
        for entry in self._scanned():
            match = _LIKE_ONE.match(entry.name)
            if match is None:
                continue
            path, why = Path(entry.path), ""
            if "damaged" in match[2]:
                why = "was set aside as damaged"
            elif entry.is_symlink():
                why = "is a symbolic link, and links are not followed"
            elif not entry.is_dir():
                continue
            elif not os.path.lexists(path / records.NAME):
                why = (
                    f"has no commit record ({records.NAME}): another program wrote it, or the record was lost"
                )
            if why:
                found.append((int(match[1]), f"{entry.name} {why}"))
        return sorted(found, reverse=True)

    @contextlib.contextmanager
    def arriving(self, name: str) -> Iterator[Path]:
        """A folder for a checkpoint that comes from elsewhere, until it is published. A failure leaves
        nothing behind."""
        folder = self.staging / f"fetched-{name}"
        if os.path.lexists(folder):
            storage.remove_tree(self.files, folder)
        folder.mkdir(parents=True)
        try:
            yield folder
        except BaseException:
            with contextlib.suppress(OSError):
                gone = storage.first_free(self.staging, (f"gone-{n}" for n in range(10_000)))
                self.files.rename(folder, gone)  # a process that still writes into it no longer finds it
                storage.remove_tree(self.files, gone)
            raise

    def publish(self, built: Path, step: int) -> Path:
        """The commit: give the finished folder its name, in one atomic step, and make the name durable. Where
        the name is taken by a folder that cannot be moved, it gets another one that is a checkpoint's,
        too."""
        final = self.root / f"checkpoint-{step}"
        if os.path.lexists(final) and not self._ours(final):
            aside = self._beside(step)
            try:
                self.files.rename(final, aside)
            except OSError as error:
                if not folders.stuck(error):
                    raise
                log.warning(
                    "%s is not a checkpoint of this run and cannot be moved: this one is %s",
                    final.name,
                    aside.name,
                )
                commit.publish(self.files, built, aside)
                return aside
            log.warning("%s is not a checkpoint of this run: it is kept as %s", final.name, aside.name)
        aside = self._beside(step)  # a name that is still a checkpoint's: so there is one at any time
        try:
            replaced = commit.publish(self.files, built, final, aside)
        except OSError as error:
            if not folders.stuck(error) or not os.path.lexists(final):
                raise
            commit.publish(self.files, built, aside)
            self._discard(final)
            if os.path.lexists(final):
                return aside
            commit.publish(self.files, aside, final)
            return final
        if replaced is not None:
            self._discard(replaced)
        return final

    def _ours(self, path: Path) -> bool:
        try:
            record = records.read(path)
        except errors.CheckpointError:
            return False
        return not path.is_symlink() and (not self.run or record.run == self.run)

    def _beside(self, step: int) -> Path:
        return storage.first_free(self.root, (f"checkpoint-{step}.replaced-{n}" for n in range(10_000)))

    def prune(self, keep: Keep | None = None) -> list[Path]:
        """Remove what rotation no longer needs, by `keep` or the catalog's own. Never the last two complete
        ones, nor the best."""
        try:
            entries = self.entries()
        except errors.UncheckedError as error:
            # the save was committed: what cannot be read now is for the next time
            log.warning("Could not delete expired checkpoints: %s", error)
            return []
        gone = [entry.path for entry in retention.superfluous(entries, keep or self.keep)]
        for path in gone:
            self._discard(path)
        if entries:
            self._trim(entries[0].record)
        return gone

    def _trim(self, newest: Record) -> None:
        """Each rank's spare space is to hold its next files, and no more."""
        by_rank: dict[int, list[int]] = {self._rank: []}
        for file in newest.files:
            by_rank.setdefault(filenames.rank_of(file.name), []).append(file.size)
        for rank, sizes in by_rank.items():
            self.pool(rank).trim(len(sizes), sum(sizes) * 5 // 4)

    def _folders(self) -> list[Path]:
        return [
            Path(entry.path)
            for entry in self._scanned()
            if _checkpoint_name(entry.name) and entry.is_dir(follow_symlinks=False)
        ]

    def _scanned(self) -> list[os.DirEntry[str]]:
        def scan() -> list[os.DirEntry[str]]:
            try:
                with os.scandir(self.root) as entries:
                    return list(entries)
            except FileNotFoundError:
                return []

        try:
            return errnos.reading(scan, f"{self.root} cannot be listed")
        except errors.UncheckedError:
            raise
        except errors.CheckpointError as error:  # a failed listing does not prove that there are none
            raise errors.UnreadableError(str(error)) from error

    def _discard(self, path: Path) -> None:
        """Take a folder out of the catalog in one step, then keep its files as spare space."""
        try:
            if not self.trash.is_dir():
                self.files.mkdir(self.trash)
            gone = storage.first_free(self.trash, (f"{path.name}-{n}" for n in range(10_000)))
            try:
                self.files.rename(path, gone)
            except OSError as error:
                if not folders.stuck(error):
                    raise
                commit.withdraw(self.files, path)
                return
            self.files.sync_directory(self.root)
            self._recycle(gone)
        except OSError as error:
            log.warning("%s could not be removed: %s", path.name, error)

    def _recycle(self, folder: Path) -> None:
        for entry in list(os.scandir(folder)):
            path = Path(entry.path)
            if entry.is_file(follow_symlinks=False) and entry.name.endswith(".safetensors"):
                self.pool(filenames.rank_of(entry.name)).give(path)
        storage.remove_tree(self.files, folder)

    def _throw_away(self, folder: Path) -> None:
        with contextlib.suppress(OSError):
            if not stat.S_ISDIR(os.lstat(folder).st_mode):
                self.files.unlink(folder)  # a link, a pipe, a file: somebody else's, where our folder belongs
                return
            for entry in list(os.scandir(folder)):
                if entry.is_dir(follow_symlinks=False):
                    self._recycle(Path(entry.path))
            storage.remove_tree(self.files, folder)


def _lock_file(path: Path) -> int:
    """Open or create it. A link in its place is refused: its target would be overwritten."""
    try:
        # less the umask
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            settings.fail(f"{path} is not a plain file. Remove it: rm {path}")
        raise
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_nlink > 1:
        os.close(fd)
        settings.fail(f"{path} is not a plain file of its own (it has other links). Remove it: rm {path}")
    return fd


def _checkpoint_name(name: str) -> bool:
    return bool(_CHECKPOINT.fullmatch(name))
