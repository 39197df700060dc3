"""The command line's frame: which commands there are, and how their errors are shown.

Only the requested command's module is imported: `lastcall run` precedes every training process, and `lastcall
--help` must be fast. So the one-line summaries are here and not in the modules.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import sys

import lastcall
from lastcall import errors

# command -> the module in lastcall.cli whose add() registers it, and a line for --help
COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("run", "run a training command: save it when it must stop, and resume it"),
    "ls": ("ls", "list the checkpoints of runs"),
    "show": ("show", "show one checkpoint in detail"),
    "verify": ("verify", "check every byte of checkpoints against its digest"),
    "export": ("export", "write a checkpoint out as one plain safetensors or .pt file"),
    "prune": ("prune", "remove checkpoints that are no longer needed; shows first what would be removed"),
    "watch": ("watch", "follow a run: step, metrics, speed, saves, notices"),
    "pause": ("pause", "save and stop a run, and keep it stopped"),
    "resume": ("pause", "resume a paused run"),
    "doctor": ("doctor", "check what will happen here when this machine is preempted"),
    "kube": ("kube.command", "Kubernetes: one annotation protects a job; pause, resume, status"),
    "drill": ("drill", "preempt a real run and report what was lost"),
}


def main(argv: list[str] | None = None) -> int:
    """Run a command; the exit code. An error that lastcall raises on purpose becomes one line on stderr."""
    try:
        code = _dispatch(sys.argv[1:] if argv is None else argv)
        if sys.stdout is not None:  # closed by the parent process: the exit code is what counts
            sys.stdout.flush()  # here, because the reader may have closed the pipe
        return code
    except errors.ConfigError:
        return errors.EXIT_CONFIG  # settings.fail() has said why
    except errors.LastcallError as error:
        return _complain(str(error))
    except SystemExit as left:  # argparse after --help or a usage error; Preempted
        if isinstance(left.code, str):
            return _complain(left.code)
        return left.code or 0
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # lastcall ls | head
        _forget_stdout()
        return 128 + signal.SIGPIPE
    except OSError as error:
        named = f"{error.filename}: {error.strerror}" if error.filename is not None else str(error)
        return _complain(named)


def _dispatch(argv: list[str]) -> int:
    if hasattr(sys.stdout, "reconfigure"):
        # a name that this terminal cannot show must not make the command fail
        sys.stdout.reconfigure(errors="backslashreplace")
    name = argv[0] if argv else ""
    args = _parser(name).parse_args(_joined(argv))
    if "call" not in args:
        _parser("").print_help(sys.stderr)
        return 2
    code: int = args.call(args)
    return code


def _joined(argv: list[str]) -> list[str]:
    """An option whose value begins with dashes, as one word: argparse would take the value for an option of
    ours."""
    end = argv.index("--") if "--" in argv else len(argv)
    for place, word in enumerate(argv[: max(0, end - 1)]):
        if word == "--resume-args":
            return [*argv[:place], f"{word}={argv[place + 1]}", *argv[place + 2 :]]
    return argv


def _parser(wanted: str) -> argparse.ArgumentParser:
    """The parser; only the requested command is fully defined in it."""
    parser = argparse.ArgumentParser(
        prog="lastcall",
        description="Saves a training run when it is asked to stop, and resumes it.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"lastcall {lastcall.__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", title="commands")
    module = COMMANDS[wanted][0] if wanted in COMMANDS else None
    for name, (home, summary) in COMMANDS.items():
        if home != module:
            subparsers.add_parser(name, help=summary)
    if module is not None:
        importlib.import_module(f"lastcall.cli.{module}").add(subparsers)
    return parser


def _complain(message: str) -> int:
    if sys.stderr is not None:
        sys.stderr.write(f"lastcall: {' '.join(message.split())}\n")
    return 1


def _forget_stdout() -> None:
    """The interpreter flushes stdout once more on its way out, and would complain of the same pipe."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
