from __future__ import annotations

import argparse
from collections.abc import Iterator

import pytest

from helpers.cli.harness import Cli
from lastcall.cli import parser as parsers


def every(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    below = parsers.below(parser)
    if below is None:
        yield parser
    else:
        for each in below.choices.values():
            yield from every(each)


LEAVES = list(every(parsers.build(parsers.COMMANDS)))
NAMES = [leaf.prog for leaf in LEAVES]


def test_each_command_is_in_one_group() -> None:
    assert [name for names in parsers.GROUPS.values() for name in names] == list(parsers.COMMANDS)


def test_help_shows_the_groups_with_a_line_for_each_command(cli: Cli) -> None:
    said = cli("--help")
    assert said.code == 0
    titles = [line.rstrip(":") for line in said.lines if line.endswith(":") and not line.startswith(" ")]
    assert titles == [*parsers.GROUPS, "options", "examples"]
    for name, (_, summary) in parsers.COMMANDS.items():
        assert f"  {name:<12}{summary}" in said.lines


def test_help_of_kube_has_groups_too(cli: Cli) -> None:
    said = cli("kube", "--help")
    assert "Jobs in a cluster:" in said.lines and "Protect jobs:" in said.lines
    below = parsers.below(parsers.build(["kube"]))
    assert below is not None
    names = parsers.below(below.choices["kube"])
    assert names is not None
    for name in names.choices:
        assert any(line.startswith(f"  {name} ") for line in said.lines), name


@pytest.mark.parametrize("leaf", LEAVES, ids=NAMES)
def test_each_help_ends_with_examples_of_the_command_and_fits_80_columns(
    leaf: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = leaf.format_help().splitlines()
    assert max(map(len, lines)) <= 80, max(lines, key=len)
    examples = lines[lines.index("examples:") + 1 :]
    assert 1 <= len(examples) <= 2
    assert all(line.startswith(f"  {leaf.prog} ") or line == f"  {leaf.prog}" for line in examples), examples


@pytest.mark.parametrize("leaf", LEAVES, ids=NAMES)
def test_each_option_is_explained(leaf: argparse.ArgumentParser) -> None:
    assert [action.dest for action in leaf._actions if not action.help] == []


def test_only_the_wanted_command_is_defined() -> None:
    below = parsers.below(parsers.build(["ls"]))
    assert below is not None
    assert "--json" in below.choices["ls"].format_help()
    assert "--json" not in below.choices["show"].format_help()


def test_words_can_be_suggested_for_an_option_that_argparse_does_not_check() -> None:
    parser = argparse.ArgumentParser()
    free, known = parser.add_argument("--free"), parser.add_argument("--known", choices=("a", "b"))
    assert (parsers.suggestions(free), parsers.suggestions(known)) == ((), ("a", "b"))
    parsers.suggest(free, ["x"])
    assert parsers.suggestions(free) == ("x",)
    assert parser.parse_args(["--free", "y"]).free == "y"


@pytest.mark.parametrize("text", ["x", "-1", "nan", "inf", ""])
def test_seconds_that_make_no_sense_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="For example: 30"):
        parsers.seconds(text)


def test_paragraphs_of_help_are_filled_and_examples_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "42")
    epilog = "one two three four five\nsix seven eight\n\nexamples:\n  a  b\n"
    parser = parsers.LastcallParser(prog="x", epilog=epilog)
    assert parser.format_help().endswith("one two three four five six seven eight\n\nexamples:\n  a  b\n")
