"""The command line: calls a command, and turns its errors into one line on stderr and an exit code."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys

from lastcall import errors
from lastcall.cli import parser


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
        return _complain(_explained(error))


def _dispatch(argv: list[str]) -> int:
    if hasattr(sys.stdout, "reconfigure"):
        # a name that this terminal cannot show must not make the command fail
        sys.stdout.reconfigure(errors="backslashreplace")
    args = parser.build(argv[:1]).parse_args(joined(argv))
    if "call" not in args:
        parser.build(()).print_help(sys.stderr)
        return 2
    code: int = args.call(args)
    return code


def joined(argv: list[str]) -> list[str]:
    """An option whose value begins with dashes, as one word: argparse would take the value for an option of
    ours."""
    end = argv.index("--") if "--" in argv else len(argv)
    for place, word in enumerate(argv[: max(0, end - 1)]):
        if word == "--resume-args":
            return [*argv[:place], f"{word}={argv[place + 1]}", *argv[place + 2 :]]
    return argv


def _explained(error: OSError) -> str:
    """Which file, and what to look at."""
    if error.filename is None:
        return str(error)
    named = f"{error.filename}: {error.strerror}"
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return f"{named}. Check the path."
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"{named}. See who may use it: ls -ld {error.filename}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{named}. See what is free: df -h {error.filename}"
    return named


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
