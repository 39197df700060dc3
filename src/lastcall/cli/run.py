"""lastcall run: starts a command, forwards notices to the training processes with their whole grace, and
makes the job resume."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lastcall import settings
from lastcall.cli import output
from lastcall.cli import parser as parsers
from lastcall.launch import options as launch_options
from lastcall.launch import platforms
from lastcall.notices.cloud import CLOUDS

if TYPE_CHECKING:
    from lastcall.launch.options import LaunchOptions
    from lastcall.launch.outcome import ExitVerdict

_EXAMPLES = """exit codes:
  0   training finished
  75  saved, run me again (1 on Run:ai, 85 on HTCondor)
  143 SIGTERM and nothing saved
  78  a setting is wrong
  126, 127 cannot start the command
  130 interrupted by a person
  otherwise the command's own

examples:
  lastcall run --grace 120 -- torchrun --nproc-per-node 8 train.py
  lastcall run --guard -- python train.py     # survives SIGKILL and OOM kills
"""
_JSON = {
    "exit_code": "the exit code of lastcall run",
    "result": "ended, saved, stopped or failed",
    "because": "the reason for the exit code",
    "crashed": "whether it ended although nothing asked it to stop",
}

_RESTART = (
    'when to start the command again here: "on-preempt", after a training process got a notice, saved and '
    "stopped "
    "(a signal to that process, or `lastcall pause`, until `lastcall resume`); "
    '"on-failure", after crashes as well; "never" (the default without --guard; with it, on-failure). After '
    "SIGTERM to the launcher, "
    "a stop file or a cloud's notice there is no restart: this machine is going away. Three crashes at "
    "one step without progress end the run"
)


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "run",
        description="Starts any command (python, torchrun, accelerate, a shell script), forwards signals and "
        "notices to the training processes below it, gives them their whole grace, and exits with the code "
        "that makes the platform restart the run.",
        epilog=_EXAMPLES,
        usage="lastcall run [options] -- COMMAND [ARGUMENT ...]",
    )
    _add_times(parser.add_argument_group("time"))
    _add_notices(parser.add_argument_group("signals that are notices, besides SIGTERM"))
    _add_exit(parser.add_argument_group("the end"))
    _add_restarts(parser.add_argument_group("when to restart on this machine"))
    _add_guard(parser.add_argument_group("the guardian"))
    parser.add_argument(
        "--no-auto",
        action="store_true",
        help="do not enable lastcall in programs that do not use it themselves",
    )
    level = _row("log_level")
    levels = parser.add_argument(
        "--log-level", metavar="LEVEL", help=f"{level.allowed} (default: {level.default})"
    )
    parsers.suggest(levels, level.allowed.removeprefix("one of ").split(", "))
    output.add_json(
        parser, _JSON, "at the end, print how it ended as one line of JSON, after the command's own output"
    )
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="COMMAND", help="the command to run, after --"
    )
    parser.set_defaults(call=run)


def _add_times(time: argparse._ArgumentGroup) -> None:
    time.add_argument(
        "--grace",
        metavar="SECONDS",
        help=f"seconds from a notice to the kill (default: {_row('grace').default:g})",
    )
    time.add_argument(
        "--kill-after",
        metavar="SECONDS",
        help="SIGKILL everything that is left this many seconds after a notice. Default: the grace plus 5 s, "
        "except training processes that are still saving and, if no grace was given, commands that never "
        "trained",
    )


def _add_notices(notices: argparse._ArgumentGroup) -> None:
    notices.add_argument(
        "--stop-file", metavar="PATH", type=Path, help="treat the appearance of this file as a notice"
    )
    cloud = notices.add_argument(
        "--cloud",
        metavar="NAME",
        default="auto",
        help="the cloud whose metadata to watch: aws, gcp, azure, none (default: auto)",
    )
    parsers.suggest(cloud, CLOUDS)


def _add_exit(ending: argparse._ArgumentGroup) -> None:
    platform = ending.add_argument(
        "--platform",
        metavar="NAME",
        default="auto",
        help=f"platform of this job: {', '.join(platforms.NAMES)} (default: auto)",
    )
    parsers.suggest(platform, ("auto", *platforms.NAMES))
    ending.add_argument(
        "--exit-code",
        metavar="CODE",
        help=f"of a saved run (default: what the platform needs; {_row('exit_code').default})",
    )
    ending.add_argument(
        "--linger",
        metavar="SECONDS",
        help="Slurm: seconds to wait for the kill after a requeue (default: 60)",
    )


def _add_restarts(again: argparse._ArgumentGroup) -> None:
    restart = again.add_argument("--restart", metavar="WHEN", help=_RESTART)
    parsers.suggest(restart, launch_options.RESTARTS)
    again.add_argument(
        "--max-restarts", metavar="N", help="restarts at most, not counting pauses (default: 10)"
    )
    again.add_argument(
        "--backoff",
        metavar="SECONDS",
        help="seconds before the first restart; doubled while there is no progress (default: 1)",
    )
    again.add_argument(
        "--resume-args",
        metavar="ARGS",
        help="for scripts that resume from a path only: added to the command once there is a checkpoint, "
        "with "
        "{path} replaced by the newest one, for example: --resume-args '--resume_from_checkpoint {path}'",
    )


def _add_guard(guard: argparse._ArgumentGroup) -> None:
    guard.add_argument(
        "--guard",
        action="store_true",
        help="keep a copy of the last step in shared memory, and save it if the process is killed",
    )
    guard.add_argument(
        "--guard-steps",
        metavar="N",
        help="steps between two copies (default: copies take at most 1%% of the time)",
    )
    guard.add_argument("--guard-seconds", metavar="SECONDS", help="seconds between two copies")


def run(args: argparse.Namespace) -> int:
    from lastcall.launch import command

    return command.launch(parsed(args), os.environ, told=_tell if args.json else None)


def _tell(verdict: ExitVerdict) -> None:
    """On stdout, behind what the command has written there. A closed stdout must not change the exit code."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        output.line(
            {
                "exit_code": verdict.code,
                "result": verdict.result.value,
                "because": verdict.because,
                "crashed": verdict.crashed,
            }
        )


def parsed(args: argparse.Namespace) -> LaunchOptions:
    """Raises ConfigError (exit code 78) where something is wrong."""
    words = tuple(args.command[1:] if args.command[:1] == ["--"] else args.command)
    if not words:
        settings.fail(
            "no command given. Put it after two dashes, for example: lastcall run -- python train.py"
        )
    guard = args.guard or args.guard_steps is not None or args.guard_seconds is not None
    config = settings.JITCheckpointConfig(
        grace=_setting("--grace", "grace", args.grace),
        guard=True if guard else None,
        guard_steps=_setting("--guard-steps", "guard_steps", args.guard_steps),
        guard_seconds=_setting("--guard-seconds", "guard_seconds", args.guard_seconds),
        exit_code=_setting("--exit-code", "exit_code", args.exit_code),
        log_level=_setting("--log-level", "log_level", args.log_level),
    )
    origins = config.origins()
    return launch_options.LaunchOptions(
        command=words,
        grace=config.grace,
        grace_given=origins["grace"] != "default",
        kill_after=None if args.kill_after is None else _seconds("--kill-after", args.kill_after),
        stop_file=args.stop_file,
        cloud=_one_of("--cloud", args.cloud, CLOUDS),
        platform=_one_of("--platform", args.platform, ("auto", *platforms.NAMES)),
        exit_code=None if origins["exit_code"] == "default" else config.exit_code,
        restart=_one_of(
            "--restart", args.restart or ("on-failure" if config.guard else "never"), launch_options.RESTARTS
        ),
        max_restarts=10 if args.max_restarts is None else _count("--max-restarts", args.max_restarts),
        backoff=1.0 if args.backoff is None else _seconds("--backoff", args.backoff),
        linger=60.0 if args.linger is None else _seconds("--linger", args.linger),
        resume_args=None if args.resume_args is None else _resume_args(args.resume_args),
        guard=config.guard,
        guard_steps=config.guard_steps,
        guard_seconds=config.guard_seconds,
        auto=not args.no_auto,
        log_level=config.log_level,
        log_level_given=args.log_level is not None,
    )


def _setting(option: str, field: str, text: str | None) -> Any:
    """Checks an option exactly like the variable of the same setting, but names the option in the message."""
    if text is None:
        return None
    setting = _row(field)
    try:
        return setting.parse(text)
    except ValueError as error:
        settings.fail(
            f"{option} {text!r} {error}. Set it to {setting.allowed}, for example: {option} {setting.example}"
        )


def _row(field: str) -> settings.Setting:
    (found,) = (setting for setting in settings.JIT if setting.field == field)
    return found


def _one_of(option: str, text: str, choices: Sequence[str]) -> str:
    """Not argparse's own check: after its exit code 2 a platform would retry again and again."""
    if text not in choices:
        settings.fail(f"{option} {text!r} is not one of the choices. Set it to one of {', '.join(choices)}")
    return text


def _resume_args(text: str) -> str:
    example = "--resume-args '--resume_from_checkpoint {path}'"
    try:
        words = shlex.split(text)
    except ValueError as error:
        settings.fail(f"--resume-args {text!r} cannot be read: {error}. For example: {example}")
    if not any("{path}" in word for word in words):
        settings.fail(
            f"--resume-args {text!r} has no place for the path. Put {{path}} there, for example: {example}"
        )
    return text


def _seconds(option: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        settings.fail(f"{option} {text!r} is not a number of seconds. For example: {option} 30")
    return number


def _count(option: str, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < 0:
        settings.fail(f"{option} {text!r} is not a whole number of at least 0. For example: {option} 5")
    return number
