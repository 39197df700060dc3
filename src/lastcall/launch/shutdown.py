"""From a notice to the last process: which processes get the signal, in which order, and which are killed
when.

members     the training processes get the notice (with its deadline) through the registry, and the signal
            itself
agents      torchrun and its like get SIGTERM, once: it makes them give their workers the time of
            TORCH_ELASTIC_SHUTDOWN_TIMEOUT.
            Without it, the first worker that leaves counts as a failure, and the others are killed after 30
            s, whatever is set
the rest    shells and everything else: nothing until the training processes have ended and a moment has
            passed, then SIGTERM
no members  the command is not known to train: the signal goes to the whole tree
SIGKILL     for what is left when the grace and a margin are over; a training process that is still saving is
            spared: the platform
will kill it if the grace was exact, and until then every second counts. --kill-after kills without exception
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Collection

from lastcall.core.process import registry
from lastcall.launch import processes
from lastcall.launch.options import LaunchOptions
from lastcall.launch.processes import LiveProcess
from lastcall.types import Notice, Outcome

log = logging.getLogger("lastcall")
_MARGIN = 5.0  # seconds after the grace until what is left is killed
_MOMENT = 2.0  # seconds in which a shell may finish its script after the training
_FOREVER = float("inf")
UNPROTECTED = (
    "No process below this launcher is protected: no training process has joined, so a notice saves nothing. "
    "In a loop of your own use lastcall.protect(); `lastcall doctor SCRIPT` says what a Trainer's or "
    "Accelerate's script needs"
)


class Shutdown:
    """The end of one incarnation. Used by the main thread only."""

    def __init__(
        self, options: LaunchOptions, book: registry.Registry, strangers: Collection[tuple[int, int]] = ()
    ) -> None:
        self._options = options
        self._book = book
        # children that this process had before it became the launcher (exec in a shell)
        self._strangers = frozenset(strangers)
        self.notice: Notice | None = None  # the first one
        self._deadline = _FOREVER
        self._agents_told: set[int] = set()
        self._rest_told = False
        self._free_since: float | None = None  # when the last training process ended
        self._patient = False
        self._killed = False
        self._warned = False
        self.elsewhere = False  # there were processes whose training, if any, cannot be seen from here

    @property
    def agents(self) -> bool:
        """Whether torchrun or the like got the signal: its exit code is then always 1."""
        return bool(self._agents_told)

    def tree(self) -> dict[int, LiveProcess]:
        found = processes.below(os.getpid())
        return {
            pid: process for pid, process in found.items() if (pid, process.started) not in self._strangers
        }

    def members(self) -> list[registry.Member]:
        """The training processes that are alive."""
        return [member for member in self._book.members() if registry.alive(member)]

    def begin(self, notice: Notice) -> None:
        """A notice has come; also for each further one, since a second signal may mean more to the command
        than the first.

        All processes are signalled before anything is logged: the log may go to a pipe that is not being
        read.
        """
        posted = self._post(notice)
        if self.notice is None:
            self.notice = notice
        self._deadline = min(
            self._deadline, notice.at + self._options.grace if notice.deadline is None else notice.deadline
        )
        tree, members = self.tree(), self.members()
        if members:
            self._tell_members(notice, tree, [member.pid for member in members], posted)
            what = (
                f"training {processes.names([member.pid for member in members])} notified, the rest of the "
                "command waits"
            )
        else:
            self._rest_told = True
            signum = signal.SIGTERM if notice.signum is None else notice.signum
            told = self._tell_all(tree, signum)
            what = f"no training process has joined, {signal.Signals(signum).name} to {processes.names(told)}"
            self.elsewhere = self.elsewhere or any(map(processes.is_elsewhere, tree.values()))
        left = max(0.0, self._deadline - time.monotonic())
        log.info("Notice: %s (%s), %.0f s left: %s", notice.reason, notice.source, left, what)
        if not (self._book.members() or self.elsewhere or self._warned):
            self._warned = True
            log.warning("%s", UNPROTECTED)

    def _post(self, notice: Notice) -> bool:
        try:
            self._book.post(notice)
        except OSError as error:
            # a full or vanished TMPDIR: the signal still arrives, but without the deadline
            log.warning(
                "Could not write the notice to the registry (%s): sending only the signal, without "
                "its deadline",
                error,
            )
            return False
        return True

    def _tell_members(
        self, notice: Notice, tree: dict[int, LiveProcess], pids: list[int], posted: bool
    ) -> None:
        if notice.signum is None and posted:
            # Without a signal there is no hurry: the registry has it, and the agents get it when the first
            # member has saved. Only a process that has finished training and runs the rest of its script no
            # longer reads the registry.
            over = [member.pid for member in self.members() if member.outcome is not None]
            processes.send([tree[pid] for pid in over if pid in tree], signal.SIGTERM)
            return
        processes.send([tree[pid] for pid in pids if pid in tree], notice.signum or signal.SIGTERM)
        self._tell_agents(tree)

    def _tell_agents(self, tree: dict[int, LiveProcess]) -> None:
        """Once each: a second signal would make torchrun stop waiting for its workers."""
        agents = [
            process for process in tree.values() if process.is_agent and process.pid not in self._agents_told
        ]
        self._agents_told.update(processes.send(agents, signal.SIGTERM))

    def _tell_all(self, tree: dict[int, LiveProcess], signum: int) -> list[int]:
        targets = [process for process in tree.values() if not processes.is_servant(process, tree)]
        told = processes.send(
            [process for process in targets if process.pid not in self._agents_told], signum
        )
        self._agents_told.update(process.pid for process in targets if process.is_agent)
        return told

    def forward(self, signum: int, child: int) -> None:
        """A signal that is not a notice: SIGINT, SIGQUIT and SIGHUP as a terminal would send them, to all;
        SIGUSR1 and SIGUSR2, which kill processes without a handler, to those with one, or else to the command
        as `kill` would.

        torchrun forwards SIGINT to its workers, and to a session the second one means "exit at once": so a
        worker below an agent gets it from the agent only.
        """
        tree = self.tree()
        targets = [process for process in tree.values() if not processes.is_servant(process, tree)]
        if signum in (signal.SIGUSR1, signal.SIGUSR2):
            targets = [process for process in targets if processes.catches(process.pid, signum)]
            targets = targets or [process for process in tree.values() if process.pid == child]
        else:
            targets = [process for process in targets if not processes.has_agent_above(process.pid, tree)]
        told = processes.send(targets, signum)
        log.info("Forwarded %s to %s", signal.Signals(signum).name, processes.names(told))

    def tick(self) -> None:
        """Called a few times a second after a notice: does what is due."""
        if self.notice is None:
            return
        now = time.monotonic()
        members = self.members()
        saving = [member for member in members if member.outcome is None]
        if members:
            self._free_since = None
            if any(
                member.outcome is not None or not registry.alive(member) for member in self._book.members()
            ):
                self._tell_agents(self.tree())
        elif self._free_since is None:
            self._free_since = now
        self._end_frozen(saving)
        if now >= self._kill_at(bool(saving)):
            self._kill()
        elif saving and now >= self._deadline + _MARGIN and not self._patient:
            self._patient = True
            log.warning(
                "The grace is over and %s still %s: not killing, every second counts (--kill-after SECONDS "
                "sets a limit)",
                processes.names([member.pid for member in saving]),
                "saves" if len(saving) == 1 else "save",
            )
        elif (
            not members
            and not self._rest_told
            and self._free_since is not None
            and now >= self._free_since + _MOMENT
        ):
            self._tell_rest()

    def _end_frozen(self, saving: list[registry.Member]) -> None:
        """A suspended rank saves nothing and keeps torchrun waiting. Once the others have saved without it,
        it is not needed."""
        roots = {member.root for member in self._book.members() if member.outcome == Outcome.SAVED.value}
        frozen = [
            member.pid for member in saving if member.root in roots and processes.is_stopped(member.pid)
        ]
        if frozen and all(member.pid in frozen for member in saving):
            log.warning(
                "Killing %s: it is suspended, and the others have saved without it", processes.names(frozen)
            )
            tree = self.tree()
            processes.send([tree[pid] for pid in frozen if pid in tree], signal.SIGKILL)

    def _tell_rest(self) -> None:
        self._rest_told = True
        told = self._tell_all(self.tree(), signal.SIGTERM)
        if told:
            log.info(
                "Training has ended: sending SIGTERM to the rest of the command, %s", processes.names(told)
            )

    def _kill_at(self, saving: bool) -> float:
        assert self.notice is not None
        if self._options.kill_after is not None:
            return self.notice.at + self._options.kill_after
        # A guessed grace must not kill a slow server; where there is training, the training processes were
        # given the same guess.
        if saving or not (self._options.grace_given or self._book.members()):
            return _FOREVER
        return self._deadline + _MARGIN

    def _kill(self) -> None:
        victims = self.tree()
        if not self._killed:
            self._killed = True
            why = "--kill-after" if self._options.kill_after is not None else "the grace plus a margin"
            log.warning("Sending SIGKILL to what is left (%s): %s is over", processes.names(victims), why)
        processes.send(victims.values(), signal.SIGKILL)
