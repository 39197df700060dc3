"""`lastcall drill`: really preempts a real run, starts it again, and reports what was lost."""

from __future__ import annotations

import argparse
import math
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lastcall import settings
from lastcall.cli import output, proof_report
from lastcall.cli import parser as parsers
from lastcall.drill import options as drill_options

if TYPE_CHECKING:
    from lastcall.drill.options import DrillOptions
    from lastcall.drill.report import DrillReport, DrillRound

_EXAMPLES = """The drill uses the command's own run directory and resumes from it. Afterwards the run is
stopped; start it again to continue. With --prove it uses scratch directories instead, runs the command once
undisturbed and once preempted, and compares every named piece of state at the same steps.

exit codes:
  0  the run resumed every time with nothing lost (--prove: identical)
  1  otherwise
  78 a setting is wrong
  130 Ctrl-C

examples:
  lastcall drill --times 5 -- python train.py
  lastcall drill --prove -- python train.py
"""
_JSON = {
    "ok": "whether every round resumed with nothing lost",
    "problem": "why the drill could not complete, or null",
    "command": "the command",
    "signal": "the signal that was sent",
    "to": "child, group or training",
    "grace": "seconds between the signal and the kill",
    "times": "the number of rounds asked for",
    "directories": "the run directories",
    "lost": "steps lost in all rounds",
    "rounds": "one entry for each round",
    "rounds[].round": "its number",
    "rounds[].ok": "whether it resumed with nothing lost",
    "rounds[].reasons": "why it did not",
    "rounds[].notes": "what else to look at",
    "rounds[].step": "the step at the signal",
    "rounds[].lost": "completed steps that had to be repeated, or null",
    "rounds[].at_least": "whether it may have lost more",
    "rounds[].came_back": "whether it started again",
    "rounds[].exact": "whether it resumed from exact checkpoints, or null",
    "rounds[].rescue": "whether a rescue saved it",
    "rounds[].killed": "whether the drill had to kill it",
    "rounds[].exit": "the exit code of the command",
    "rounds[].died_of": "the signal that it died of, or null",
    "rounds[].seconds": "how long each phase took",
    "rounds[].directories": "what happened in each run directory",
    "end": "how the run ended: how, exit, saved; or null",
    "log": "the file with the command's output, or null",
    **{name: f"with --prove: {text}" for name, text in proof_report.FIELDS.items()},
}
_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP")
_STEPS = 20
_TO_HELP = """which processes get the signal: "child", the command's own process; when it exits the rest is
killed, as in a container (default); "group", its process group, as from a terminal or a batch system;
"training", the processes that use lastcall"""

_ENDS = {
    "finished": "The run has finished",
    "left": "The run exited on its own",
    "stopped": "The drill stopped the run",
    "killed": "The drill killed the run",
}


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "drill",
        description="Starts the command, sends it the signal, kills it when the grace ends, starts it again, "
        "and reports what was lost, how long each phase took, and whether it resumed.",
        epilog=_EXAMPLES,
        usage="lastcall drill [options] -- COMMAND [ARGUMENT ...]",
    )
    # Values are checked in parsed(): a wrong one exits with 78 like every wrong setting, not with argparse's
    # 2.
    moment = parser.add_mutually_exclusive_group()
    moment.add_argument("--at", metavar="STEP", help="preempt round n at n times this step")
    moment.add_argument(
        "--after",
        metavar="SECONDS",
        help="preempt this long after the first step of each incarnation (default: random, "
        f"{drill_options.EARLIEST:g} to {drill_options.LATEST:g} s)",
    )
    parser.add_argument("--times", metavar="N", default="1", help="number of rounds (default: 1)")
    parser.add_argument(
        "--grace",
        metavar="SECONDS",
        default="30",
        help="seconds between the signal and the kill (default: 30)",
    )
    signals = parser.add_argument(
        "--signal",
        metavar="NAME",
        default="SIGTERM",
        help="the signal that the platform sends (default: SIGTERM)",
    )
    parsers.suggest(signals, _SIGNALS)
    parser.add_argument("--to", choices=drill_options.TO, default="child", help=_TO_HELP)
    parser.add_argument(
        "--to-the-end",
        action="store_true",
        help="let the run finish after the last round and expect exit code 0",
    )
    parser.add_argument(
        "--patience",
        metavar="SECONDS",
        default="300",
        help="seconds to wait for a step, the first one included (default: 300)",
    )
    parser.add_argument("--log", metavar="FILE", type=Path, help="append the command's output to this file")
    parser.add_argument(
        "--prove",
        action="store_true",
        help="prove that a preempted run of this command is identical to an undisturbed one; uses scratch "
        "directories",
    )
    parser.add_argument("--steps", metavar="N", help=f"with --prove: steps to compare (default: {_STEPS})")
    output.add_json(parser, _JSON)
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="COMMAND", help="the command to run, after --"
    )
    parser.set_defaults(call=run)


def run(args: argparse.Namespace) -> int:
    from lastcall.drill import runner

    if args.prove:
        return _prove(args)
    if args.steps is not None:
        settings.fail("--steps needs --prove: lastcall drill --prove --steps 50 -- python train.py")
    report = runner.Drill(parsed(args), _say).run()
    if args.json:
        output.document(report.to_json())
    else:
        _print(report)
    if report.interrupted is not None:
        return 128 + report.interrupted
    return 0 if report.ok else 1


def _prove(args: argparse.Namespace) -> int:
    from lastcall.drill import proof

    for option, given in (("--after", args.after is not None), ("--to-the-end", args.to_the_end)):
        if given:
            settings.fail(f"{option} cannot be used with --prove, which preempts at a step: use --at STEP")
    steps = _STEPS if args.steps is None else _count("--steps", args.steps)
    verdict = proof.Proof(parsed(args), steps, _say_prove).run()
    if args.json:
        output.document(proof_report.to_json(verdict))
    else:
        for line in proof_report.lines(verdict):
            output.say(output.printable(line), hang="  ", state=proof_report.word(verdict))
    if verdict.interrupted is not None:
        return 128 + verdict.interrupted
    return 0 if verdict.proved else 1


def parsed(args: argparse.Namespace) -> DrillOptions:
    """Raises ConfigError (exit code 78) where something is wrong."""
    words = tuple(args.command[1:] if args.command[:1] == ["--"] else args.command)
    if not words:
        settings.fail(
            "no command given. Put it after two dashes, for example: lastcall drill -- python train.py"
        )
    return drill_options.DrillOptions(
        command=words,
        at=None if args.at is None else _count("--at", args.at),
        after=None if args.after is None else _seconds("--after", args.after),
        grace=_seconds("--grace", args.grace),
        signum=_signal(args.signal),
        to=args.to,
        times=_count("--times", args.times),
        patience=_seconds("--patience", args.patience),
        to_the_end=args.to_the_end,
        log=args.log,
    )


def _count(option: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        settings.fail(f"{option} {text}: must be a whole number of at least 1")
    return int(text)


def _seconds(option: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds >= 0):
        settings.fail(f"{option} {text}: must be a number of seconds of at least 0")
    return seconds


def _signal(text: str) -> int:
    name = text.strip().upper()
    try:
        return (
            signal.Signals(int(name))
            if name.isdecimal()
            else signal.Signals[name if name.startswith("SIG") else f"SIG{name}"]
        )
    except (KeyError, ValueError):
        settings.fail(
            f"--signal {text}: no such signal. Platforms send {', '.join(_SIGNALS[:-1])} or {_SIGNALS[-1]}"
        )


def _say(line: str) -> None:
    sys.stderr.write(f"drill: {output.printable(line)}\n")
    sys.stderr.flush()


def _say_prove(line: str) -> None:
    sys.stderr.write(f"prove: {output.printable(line)}\n")
    sys.stderr.flush()


def _print(report: DrillReport) -> None:
    options = report.options
    for directory in report.directories:
        output.write(f"{output.printable(str(directory))}")
    if report.rounds:
        _tables(report)
    for round in report.rounds:
        for sentence in (*round.reasons, *round.notes):
            output.say(f"Round {round.number}: {output.printable(sentence)}", hang="  ")
    if report.problem is not None:
        output.say(f"The drill did not complete: {output.printable(report.problem)}", hang="  ")
    if report.end is not None:
        output.say(
            f"{_ENDS[report.end.how]}{'' if report.end.saved else ' without a checkpoint'}, exit "
            f"code {report.end.exit}."
        )
    good = sum(round.ok for round in report.rounds)
    verdict = f"{good} of {output.plural(options.times, 'round')}"
    output.write(
        output.paint(verdict, output.Colour.GOOD if report.ok else output.Colour.BAD)
        + " resumed with nothing lost."
    )
    if report.log is not None:
        output.say(f"The command's output is in {output.printable(str(report.log))}")


def _tables(report: DrillReport) -> None:
    """What was lost, then how long each phase took: together they are too wide for most terminals."""
    head = ("ROUND", "STEP", "EXIT", "BACK FROM", "LOST", "RESULT")
    rows = [_row(round) for round in report.rounds]
    folded = {"BACK FROM": 20, "RESULT": 14}
    output.table(head, rows, right=("ROUND", "STEP", "EXIT", "LOST"), states=("RESULT",), folded=folded)
    output.write()
    output.say(f"Seconds from {report.options.signal_name} until the run was gone, then from the restart:")
    phases = ("ROUND", "NOTICED", "SAVING", "COMMITTED", "GONE", "RESUMED", "STEPS AGAIN")
    output.table(phases, [_times(round) for round in report.rounds], right=phases)
    output.write()


def _row(round: DrillRound) -> tuple[str, ...]:
    origins = (
        sorted({item.resumed.name if item.resumed else "the beginning" for item in round.parts})
        if round.back.came
        else ["-"]
    )
    lost = "?" if round.lost is None else f"{'>= ' if round.at_least else ''}{round.lost}"
    exit = round.gone.died_of or str(round.gone.exit)
    return str(round.number), str(round.step), exit, ", ".join(origins), lost, _result(round)


def _times(round: DrillRound) -> tuple[str, ...]:
    phases = ("noticed", "save_begins", "committed", "gone", "resumed", "first_step")
    return (str(round.number), *(_cell(round.seconds[name]) for name in phases))


def _cell(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f}"


def _result(round: DrillRound) -> str:
    if not round.back.came:
        return "did not resume"
    words = ["nothing lost" if round.ok else "LOST" if round.lost else "not exact"]
    words += ["rescued"] if any(item.rescued for item in round.parts) else []
    words += ["killed"] if round.gone.killed else []
    return ", ".join(words)
