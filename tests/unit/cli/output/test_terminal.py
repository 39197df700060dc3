from __future__ import annotations

import io

import pytest

from lastcall.cli import output


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("environ", "on_a_terminal", "elsewhere"),
    [
        ({}, True, False),
        ({"TERM": "dumb"}, False, False),
        ({"NO_COLOR": "1"}, False, False),
        ({"NO_COLOR": ""}, True, False),
        ({"FORCE_COLOR": "1"}, True, True),
        ({"FORCE_COLOR": "0"}, True, False),
        ({"CLICOLOR_FORCE": "1"}, True, True),
        ({"CLICOLOR_FORCE": "1", "TERM": "dumb"}, True, True),
        ({"FORCE_COLOR": "1", "CLICOLOR_FORCE": "1", "NO_COLOR": "1"}, False, False),
    ],
)
def test_colours_are_for_terminals_unless_a_variable_says_otherwise(
    environ: dict[str, str], on_a_terminal: bool, elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert output.coloured(Terminal()) is on_a_terminal
    assert output.coloured(io.StringIO()) is elsewhere


@pytest.mark.parametrize(
    ("text", "painted"),
    [
        ("yes   ", "\x1b[32myes\x1b[0m   "),
        ("no: the time did not suffice", "\x1b[33mno\x1b[0m: the time did not suffice"),
        ("nothing lost, rescued", "\x1b[32mnothing lost\x1b[0m, rescued"),
        ("LOST, killed", "\x1b[31mLOST\x1b[0m, killed"),
        ("running (process 7)", "\x1b[32mrunning\x1b[0m (process 7)"),
        ("checkpoint-7", "checkpoint-7"),
        ("", ""),
    ],
)
def test_only_the_words_that_say_how_it_stands_have_a_colour(
    text: str, painted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert output.state(text) == painted
    monkeypatch.setenv("NO_COLOR", "1")
    assert output.state(text) == text


def test_the_width_is_80_where_it_is_unknown_and_never_too_small_for_a_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("COLUMNS")
    assert output.width() == 80 or output.interactive(None)
    monkeypatch.setenv("COLUMNS", "120")
    assert output.width() == 120
    monkeypatch.setenv("COLUMNS", "7")
    assert output.width() == 40


def test_a_closed_stream_is_no_terminal() -> None:
    assert not output.interactive(None)
