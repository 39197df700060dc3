from __future__ import annotations

import argparse
from pathlib import Path

from lastcall.cli import parser as parsers
from lastcall.cli.completion.grammar import CompletedCommand, Completes, read

ROOT = read(parsers.build(parsers.COMMANDS))
BY_PATH = {" ".join(command.path): command for command in ROOT.all()}


def value(command: CompletedCommand, option: str) -> Completes:
    (found,) = [each for each in command.options if option in each.names]
    assert found.value is not None
    return found.value.completes


def test_every_command_and_every_option_is_in_it() -> None:
    assert {each.path[0] for each in ROOT.below} == set(parsers.COMMANDS)
    assert {"kube status", "kube pause", "kube resume", "kube inject", "kube manifest"} <= set(BY_PATH)
    assert {name for option in BY_PATH["ls"].options for name in option.names} == {"-h", "--help", "--json"}
    assert all(command.help for path, command in BY_PATH.items() if path)


def test_values_are_known_by_their_names_types_and_choices() -> None:
    assert [each.completes for each in BY_PATH["export"].values] == [Completes.FOLDERS, Completes.FILES]
    assert BY_PATH["verify"].values[0].repeats and not BY_PATH["show"].values[0].repeats
    assert value(BY_PATH["export"], "--format") is Completes.WORDS
    assert value(BY_PATH["run"], "--restart") is Completes.WORDS
    assert value(BY_PATH["run"], "--grace") is Completes.NOTHING
    assert value(BY_PATH["run"], "--stop-file") is Completes.FILES
    assert value(BY_PATH["kube inject"], "-f") is Completes.FILES
    assert value(BY_PATH["kube manifest"], "--output") is Completes.FOLDERS


def test_three_commands_run_another_one() -> None:
    found = {path for path, command in BY_PATH.items() if command.runs_another}
    assert found == {"run", "doctor", "drill"}


def test_the_help_of_an_option_is_its_first_part() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--a", help="the a (default: b)")
    parser.add_argument("--b", type=Path, help="the b; or not")
    parser.add_argument("--c", help=argparse.SUPPRESS)
    _, first, second = read(parser).options
    assert (first.help, second.help) == ("the a", "the b")
    assert second.value is not None and second.value.completes is Completes.FILES
