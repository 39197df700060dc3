"""How the ranks of a run begin together: which store they use, which directory it is, which checkpoint they
continue from (`load_vote`).

    meet     rank 0 opens the directory, writes its token there, and tells the others; all of them switch to
             the store of
             `lastcall run` where there is one, which outlives every training process
    load     rank 0 names a checkpoint, every rank loads its part of it, and all vote: one that finds damage
             makes all try the next
    begin    no rank takes a step before all have voted: so a notice that comes earlier finds nothing to save

A rank that is asked to stop while it waits here vetoes: the vote's register decides whether that came in
time.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from lastcall import clock as clocks
from lastcall import errors, settings
from lastcall.core.checkpoint.catalog import Catalog
from lastcall.core.checkpoint.ownership import Fence
from lastcall.core.checkpoint.record import Entry
from lastcall.core.engine import digest
from lastcall.core.engine.writer import Engine
from lastcall.core.joint.load_vote import Bring, LoadVote
from lastcall.core.mirror.mirror import Mirror
from lastcall.core.process.identity import Process
from lastcall.core.ranks import keys as keyring
from lastcall.core.ranks import rendezvous
from lastcall.core.ranks.agreement import Agreement
from lastcall.core.ranks.heartbeat import Peers
from lastcall.core.ranks.keys import Keys
from lastcall.core.ranks.world import World
from lastcall.core.store import Scoped, Store
from lastcall.core.store.anchored import Anchored
from lastcall.core.store.folder import FolderStore
from lastcall.core.store.nowhere import NullStore
from lastcall.core.subject import Restorable
from lastcall.core.sync.stopped import Stopped
from lastcall.core.transfer import directories
from lastcall.core.transfer.directories import Directories
from lastcall.storage import files as storage

log = logging.getLogger("lastcall")
_SEEN = 30.0  # seconds in which a file that rank 0 wrote must be seen by the others
AGREEMENT = "agreement"  # in the run's private folder: what the ranks have decided


@dataclass(frozen=True)
class Start:
    """What rank 0 tells the others."""

    run: str
    incarnation: int
    token: str
    # the address of the launcher's store; empty where there is none. Nothing in here is a secret: see `keys`
    store: str = ""
    mirror: bool = False  # whether there is one: then the ranks need no shared directory
    algorithm: str = digest.ALGORITHM  # of digests

    def to_bytes(self) -> bytes:
        return json.dumps(self.__dict__).encode()


@dataclass(frozen=True)
class Joined:
    start: Start
    fence: Fence
    store: Store
    peers: Peers
    keys: Keys
    directories: Directories = field(default_factory=lambda: Directories(0))
    over: threading.Event = field(default_factory=threading.Event)  # all ranks have finished


def _nowhere(record: str) -> None:
    """Where all ranks share one directory, nothing has to be transferred."""


class JointStart:
    def __init__(
        self,
        world: World,
        catalog: Catalog,
        clock: clocks.Clock,
        stop_requested: Callable[[], bool],
        mirror: Mirror | None = None,
    ) -> None:
        self._world = world
        self._catalog = catalog
        self._clock = clock
        self._stop_requested = stop_requested  # whether a notice has come to this rank
        self._place_of_keys, self._mirror = mirror, mirror is not None
        self._shared = ""  # the token of keys that are in the mirror
        self._rendezvous = rendezvous.Rendezvous(world, clock, stop_requested)
        self.mine = Process.own()
        self._store: Store | None = None
        self._directories = Directories(world.rank)

    # ---- meet ----------------------------------------------------------------------------------------------

    def lead(self, run: str, incarnation: int) -> Joined:
        """Rank 0, which holds the directory's lock."""
        fence = Fence.take(self._catalog.private, incarnation)
        sweep(self._catalog)
        address, secret = self._offer()
        keys = Keys.made(fence.token, secret)
        keys.write(self._catalog.private)
        start = Start(run, incarnation, fence.token, address, self._mirror)
        if self._mirror:
            directories.mark(self._place(start), 0).mkdir(parents=True, exist_ok=True)
        self._rendezvous.store.claim(
            "start", json.dumps({**start.__dict__, "root": str(self._catalog.root.resolve())}).encode()
        )
        return self._join(start, fence, keys)

    def refuse(self, error: BaseException) -> None:
        """Rank 0 cannot start: the others must not wait for it."""
        self._rendezvous.store.claim(
            "start", json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode()
        )

    def leave(self) -> None:
        self._rendezvous.leave()

    def left(self) -> bool:
        return self._rendezvous.left()

    def fail(self, error: BaseException) -> None:
        self._rendezvous.fail(error)

    def follow(self) -> Joined:
        """Every other rank."""
        body = json.loads(self._rendezvous.wait("start", "rank 0 to open the directory"))
        if "failed" in body:
            raise errors.RanksError(f"rank 0 could not start: {body['failed']}")
        theirs, ours = body.pop("root"), str(self._catalog.root.resolve())
        start = Start(**body)
        fence = Fence(self._catalog.private, start.token)
        if start.algorithm != digest.ALGORITHM:
            raise errors.RanksError(
                f"rank 0 writes digests of the kind {start.algorithm} and rank {self._world.rank} "
                f"{digest.ALGORITHM}: neither could "
                "check what the other has written. Install the same on all machines: pip install xxhash"
            )
        if not start.mirror:
            self._check_directory(fence, theirs, ours)
        return self._join(start, fence, None)

    def _check_directory(self, fence: Fence, theirs: str, ours: str) -> None:
        until = self._clock.now() + (_SEEN if theirs == ours else 0.0)
        while not fence.holds():
            if self._clock.now() < until:
                self._clock.sleep(0.2)
                continue
            if theirs != ours:
                raise errors.RanksError(
                    f"rank 0 protects {theirs} and rank {self._world.rank} protects {ours}: all ranks of a "
                    "run save into one "
                    "directory. Give protect() the same on every rank; or give all ranks a mirror, and each "
                    "machine may have a "
                    "directory of its own: export LASTCALL_MIRROR=s3://BUCKET/PREFIX; or, if they are "
                    "separate runs: export "
                    "LASTCALL_RANKS=separate"
                )
            raise errors.RanksError(
                f"rank {self._world.rank} cannot see the files that rank 0 has written to {ours}: the ranks "
                "of a run save into one "
                "directory on a file system that all machines share. Give protect() a directory there; or "
                "give all ranks a mirror, "
                "and each machine may have a directory of its own: export LASTCALL_MIRROR=s3://BUCKET/PREFIX"
            )

    def _offer(self) -> tuple[str, str]:
        """The address of the launcher's store, if there is one, and the secret that opens it."""
        from lastcall.core.store import client

        found = client.parse_port_and_secret(settings.launcher_store() or "")
        if found is None:
            return "", ""
        # where all ranks are on this machine, the store listens on loopback only
        for host in (self._world.address, "127.0.0.1"):
            try:
                client.StoreClient(host, *found).close()
                return f"{host}:{found[0]}", found[1]
            except errors.StoreLost as error:
                log.debug("Could not reach the store of `lastcall run` at %s: %s", host, error)
        return f"{self._world.address}:{found[0]}", found[1]

    def _join(self, start: Start, fence: Fence, keys: Keys | None) -> Joined:
        self._directories = self._find_directories(start) if start.mirror else self._directories
        if keys is None:
            keys = self._find_keys(start)
        elif self._directories.spread and self._place_of_keys is not None:
            self._place_of_keys.share(
                start.token, keys.to_bytes(), self._stop_requested, self._rendezvous.left
            )
            self._shared = start.token
        fast, connect = self._change_over(start, keys)
        over = threading.Event()
        store = Anchored(
            fast, NullStore() if self._directories.spread else FolderStore(self._place(start)), connect, over
        )
        Peers.register(store, self._world.rank, self.mine)
        self._store = store
        return Joined(start, fence, store, Peers({}, self.mine.host), keys, self._directories, over)

    def _find_keys(self, start: Start) -> Keys:
        """From the directory that this rank shares with rank 0, or else from the mirror."""
        until = self._clock.now() + _SEEN
        while True:
            if not self._directories.elsewhere:
                found = keyring.read(self._catalog.private, start.token)
            else:
                assert self._place_of_keys is not None
                found = keyring.parse(
                    self._place_of_keys.shared(start.token, self._stop_requested, self._rendezvous.left),
                    start.token,
                )
            if found is not None:
                return found
            if self._stop_requested():
                self._rendezvous.leave()
                raise Stopped
            self._rendezvous.check()
            if self._clock.now() >= until:
                raise errors.RanksError(
                    f"rank {self._world.rank} cannot read {self._catalog.private / keyring.NAME}, which rank "
                    "0 has written for this "
                    "user alone. Start all ranks of a run as the same user"
                )
            self._clock.sleep(0.2)

    def all_here(self) -> None:
        """All ranks have begun: the keys are no longer needed."""
        shared, self._shared = self._shared, ""
        if shared and self._place_of_keys is not None:
            self._place_of_keys.unshare(shared)

    def _find_directories(self, start: Start) -> Directories:
        return directories.find(
            self._rendezvous, self._world, self._catalog, self._place(start), self._mirror, self._clock
        )

    def _place(self, start: Start) -> Path:
        """Where decisions are anchored, and where the others look for the marks of those that share the
        directory."""
        return self._catalog.private / AGREEMENT / start.token

    def opened(self) -> None:
        """This incarnation owns a directory beside that of rank 0: the other ranks that share it may
        continue."""
        sweep(self._catalog)  # the marks, too: all have been seen
        self._rendezvous.store.set(f"opened/{self._directories.name}", b"1")

    def wait_until_opened(self) -> None:
        self._rendezvous.wait(
            f"opened/{self._directories.name}", f"rank {self._directories.leader} to open the directory"
        )

    def _change_over(self, start: Start, keys: Keys) -> tuple[Store, Callable[[], Store]]:
        """The launcher's store, if all ranks can reach it, and how to connect to it again. The ranks that can
        are counted in the store where they have met."""
        if not start.store:
            return self._rendezvous.store, self._world.meet
        from lastcall.core.store import client

        host, _, port = start.store.rpartition(":")

        def connect() -> Store:
            return Scoped(client.StoreClient(host, int(port), keys.store), f"{start.token}/")

        try:
            theirs: Store | None = connect()
        except errors.StoreLost as error:
            log.warning("Could not use the store of `lastcall run` on %s: %s", host, error)
            theirs = None
        failing = 1 << 32
        total = self._rendezvous.store.add("over", 1 if theirs is not None else failing + 1)
        if total % failing == self._world.size:
            self._rendezvous.store.claim("all over", b"yes" if total < failing else b"no")
        if self._rendezvous.wait("all over", "all ranks to reach the launcher's store") == b"yes":
            assert theirs is not None
            return theirs, connect
        if theirs is not None:
            theirs.close()
        return self._rendezvous.store, self._world.meet

    # ---- load ----------------------------------------------------------------------------------------------

    def load(
        self, agreement: Agreement, engine: Engine, subject: Restorable, bring: Bring = _nowhere
    ) -> Entry | None:
        """The checkpoint that all ranks continue from. Returns when all of them have it."""
        return LoadVote(
            self._world, self._catalog, self._clock, self._stop_requested, self._rendezvous,
            self._directories, agreement, engine, subject, bring, self.check, self._dead,
        ).load()  # fmt: skip

    def check(self, rank: int) -> None:
        """Stopped or RanksError where waiting for this rank is useless."""
        self._rendezvous.check()
        if rank in self._dead():
            raise errors.RanksError(f"rank {rank} died before the ranks had begun")

    def _dead(self) -> set[int]:
        """The ranks of this host that have come and are gone."""
        if self._store is None:
            return set()
        try:
            return Peers.of_host(self._store, self.mine, all_of_them=True).gone()
        except errors.StoreLost:
            return set()


def sweep(catalog: Catalog) -> None:
    """Decisions of earlier incarnations are no longer needed."""
    folder = catalog.private / AGREEMENT
    try:
        if folder.exists():
            storage.remove_tree(catalog.files, folder)
    except OSError as error:
        log.debug("%s could not be removed: %s", folder, error)
