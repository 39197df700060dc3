"""Does the notice arrive: which process is PID 1, which shells are between it and the training, which signals
are ignored or blocked."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lastcall.doctor import finding
from lastcall.doctor.finding import Finding
from lastcall.launch import processes
from lastcall.launch.shell import scripts
from lastcall.launch.shell.commandline import Launch
from lastcall.notices import ancestry

# Init programs for PID 1 of a container: each forwards SIGTERM to its child.
_INITS = frozenset(
    {
        "tini",
        "tini-static",
        "docker-init",
        "dumb-init",
        "catatonit",
        "s6-svscan",
        "supervisord",
        "runsvdir",
        "podman-init",
    }
)
# Managers that signal every process of a job themselves, whatever is in between.
_MANAGERS = frozenset({"systemd", "init", "launchd", "openrc-init", "slurmstepd"})
_AS_COMMAND = 'command: ["lastcall", "run", "--", "python", "train.py"]'

_UNBLOCK = (
    'python3 -c "import os, signal, sys; signal.pthread_sigmask(signal.SIG_SETMASK, []); '
    'os.execvp(sys.argv[1], sys.argv[1:])"'
)


@dataclass(frozen=True)
class Ancestor:
    """A process above this one."""

    pid: int
    argv: tuple[str, ...]
    minds: bool  # it has a handler for SIGTERM or waits for it

    @property
    def program(self) -> str:
        return processes.program_of(self.argv)[0].lstrip("-") or "?"

    @property
    def launches(self) -> bool:
        """`lastcall run`, which forwards notices to everything below it."""
        program, rest = processes.program_of(self.argv)
        return program == "lastcall" and rest[:1] == ("run",)


def above(pid: int) -> list[Ancestor]:
    """From the parent up. Ends at PID 1, or earlier for a process from outside of the container (docker
    exec)."""
    found = []
    while (parent := ancestry.parent_of(pid)) > 0:
        found.append(ancestor(parent))
        pid = parent
    return found


def ancestor(pid: int) -> Ancestor:
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]
    except OSError:
        raw = []
    caught, blocked, _ = masks(pid)
    return Ancestor(
        pid, tuple(word.decode(errors="replace") for word in raw), signal.SIGTERM in caught | blocked
    )


def masks(pid: int | str) -> tuple[set[int], set[int], set[int]]:
    """The signals that a process catches, blocks and ignores."""
    found: dict[str, set[int]] = {}
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name in ("SigCgt", "SigBlk", "SigIgn"):
            bits = int(value, 16)
            found[name] = {number for number in range(1, 65) if bits >> (number - 1) & 1}
    return found.get("SigCgt", set()), found.get("SigBlk", set()), found.get("SigIgn", set())


def check_first(own: int, chain: Sequence[Ancestor]) -> Finding:
    """PID 1 gets the SIGTERM of a container, and the kernel drops it if PID 1 has no handler."""
    if own == 1:
        return finding.ok("pid-1", "the command is PID 1 itself: SIGTERM reaches it directly", pid=1)
    first = chain[-1] if chain and chain[-1].pid == 1 else ancestor(1)
    facts = {"program": first.program, "command": list(first.argv)}
    name = first.program
    if not first.argv:
        return finding.ok("pid-1", "PID 1 is not visible from here", **facts)
    if first.launches or name in _INITS:
        return finding.ok("pid-1", f"PID 1 is {name}: it forwards SIGTERM", **facts)
    if name in _MANAGERS:
        return finding.ok(
            "pid-1", f"PID 1 is {name}: it sends SIGTERM to every process of a job itself", **facts
        )
    if name in scripts.SHELLS:
        return _first_is_shell(first, facts)
    if first.minds:
        return finding.ok("pid-1", f"PID 1 is {name}, which handles SIGTERM", **facts)
    return finding.warning(
        "pid-1",
        f"PID 1 is {name}, which has no handler for SIGTERM: a SIGTERM sent to it reaches no process",
        f"in a container, make this its command instead: {_AS_COMMAND}",
        **facts,
    )


def _first_is_shell(first: Ancestor, facts: Mapping[str, object]) -> Finding:
    name = first.program
    script = scripts.of_command(first.argv)
    if script is not None and script.training is not None and not script.stays:
        return finding.ok(
            "pid-1", f"PID 1 is {name}, and {script.name} replaces it with the training (exec)", **facts
        )
    if first.minds and not scripts.is_interactive(first.argv):
        return finding.warning(
            "pid-1",
            f"PID 1 is {name} with a trap for SIGTERM: the training gets the signal only if the trap "
            "forwards it",
            f"put lastcall run in front of it, which needs no trap: {_AS_COMMAND}",
            **facts,
        )
    return finding.risk(
        "pid-1",
        f"PID 1 is {name}, a shell: it does not forward SIGTERM, and the training is killed without a notice",
        f"make lastcall run PID 1: {_AS_COMMAND}; or write exec before the last command of the script",
        **facts,
    )


def with_stop_file(found: Finding, stop_file: str | None) -> Finding:
    """A lost signal does no harm if the notice also comes as a file, which a preStop hook writes before
    SIGTERM."""
    if stop_file is None or found.level == "ok":
        return found
    return finding.ok(found.name, f"{found.says}; but the notice also comes as {stop_file}", **found.facts)


def check_between(chain: Sequence[Ancestor], environ: Mapping[str, str]) -> Finding:
    """A shell that runs a script dies of SIGTERM, or waits for its child first; either way the training does
    not get it."""
    between = [item for item in chain if item.pid != 1]
    top = chain[-1] if chain else None
    ways = " <- ".join(item.program for item in chain) or "an unknown process"
    if (top is not None and top.program in _MANAGERS) or environ.get("SLURM_JOB_ID"):
        return finding.ok(
            "shells",
            f"started by {ways}: the manager signals each of them itself",
            ancestors=[i.program for i in chain],
        )
    for item in reversed(between):  # from the outside in
        if item.launches or scripts.is_interactive(item.argv):
            break
        script = scripts.of_command(item.argv)
        if script is None or script.training is None or not script.stays:
            continue
        return _in_the_way("shells", script, f"process {item.pid}, {script.name}", pid=item.pid)
    return finding.ok(
        "shells", f"no shell blocks signals here ({ways})", ancestors=[i.program for i in chain]
    )


def check_command(launch: Launch, environ: Mapping[str, str]) -> Iterator[Finding]:
    for script in launch.shells:
        if script.training is None:
            yield finding.ok("script", f"{script.name}: no command in it is known to train")
        elif not script.stays:
            yield finding.ok("script", f"{script.name} is replaced by the training: signals reach it")
        elif environ.get("SLURM_JOB_ID"):
            yield finding.ok(
                "script",
                f"{script.name} keeps running, but at the end of a job Slurm sends SIGTERM to "
                "every process of it",
            )
        else:
            yield _in_the_way("script", script, script.name)
    if launch.given and not launch.shells:
        how = "lastcall run is above it" if launch.wrapped else "no shell is in between"
        yield finding.ok("script", f"signals reach the training: {how}")


def _in_the_way(name: str, script: scripts.ShellScript, who: str, **facts: object) -> Finding:
    training = script.training
    assert training is not None
    line = shlex.join(training.words).replace("'$@'", '"$@"')
    where = f"line {training.line} of {script.path}" if script.path else "the command"
    around = f"lastcall run -- {script.shell if script.path else script.name} {script.path or '...'}"
    says = (
        f"{who} runs `{line}` without exec: SIGTERM ends or stops the shell, and the training never gets it"
    )
    remedy = f"write in {where}: exec {line}; or start it with: {around}"
    facts = {**facts, "script": script.path, "line": training.line}
    if script.traps:
        return finding.warning(
            name,
            f"{who} has a trap for SIGTERM: the training gets the signal only if the trap forwards it",
            remedy,
            **facts,
        )
    return finding.risk(name, says, remedy, **facts)


def check_signals(
    names: Sequence[str], blocked: set[int], ignored: set[int], launch: Launch
) -> Iterator[Finding]:
    """What was inherited. A session installs its handlers anyway; other processes on the way, and this one
    until then, miss the signals."""
    deaf = {name: "ignored" for name in names if signal.Signals[name] in ignored}
    deaf |= {name: "blocked" for name in names if signal.Signals[name] in blocked}
    facts = {
        "signals": list(names),
        "ignored": sorted(_names(ignored)),
        "blocked": sorted(_names(blocked)),
    }
    for name, how in deaf.items():
        says = (
            f"{name} is inherited as {how} from the parent process: shells and launchers on the way do not "
            "get "
            "it, nor does the program while it starts"
        )
        remedy = (
            f"env --default-signal={name[3:]} {launch.text or 'COMMAND'}"
            if how == "ignored"
            else f"{_UNBLOCK} {launch.text or 'COMMAND'}"
        )
        yield (finding.warning if launch.wrapped else finding.risk)("signals", says, remedy, **facts)
    if not names:
        yield finding.risk(
            "signals",
            "LASTCALL_SIGNALS names no signal: notices can only come from other sources",
            "unset LASTCALL_SIGNALS",
            **facts,
        )
    unheard = [name for name in names if name in ("SIGUSR1", "SIGUSR2")]
    if unheard and launch.torchrun and not launch.wrapped:
        yield finding.warning(
            "signals",
            f"torchrun does not forward {' and '.join(unheard)} to its workers; the signal kills torchrun "
            "itself",
            f"lastcall run -- {launch.text}",
            **facts,
        )
    elif names and not deaf:
        yield finding.ok("signals", f"{', '.join(names)} can arrive: neither ignored nor blocked", **facts)


def _names(numbers: set[int]) -> list[str]:
    known = {item.value: item.name for item in signal.Signals}
    return [known.get(number, f"signal {number}") for number in numbers if number in known]


def own_masks() -> tuple[set[int], set[int]]:
    """Blocked and ignored here, less what Python itself ignores."""
    _, blocked, ignored = masks(os.getpid())
    return blocked, ignored - {signal.SIGPIPE, signal.SIGXFSZ}
