from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastcall.cli import output

HEAD = ("NAME", "N", "WHY")
ROWS = [("checkpoint-1", "1", "it is one of the last two"), ("checkpoint-22", "22", "it is the best")]


def printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int, **more: Any
) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(width))
    output.table(HEAD, ROWS, right=("N",), **more)
    return capsys.readouterr().out.splitlines()


def test_a_table_is_as_wide_as_what_is_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    output.table(("NAME", "N"), [("a", "1"), ("longer\n", "100")], right=("N",))
    assert capsys.readouterr().out.splitlines() == ["NAME        N", "a           1", "longer\\n  100"]


def test_a_column_that_can_be_spared_is_left_out_only_where_there_is_no_room(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert printed(capsys, monkeypatch, 80, spared=("WHY",))[0] == "NAME            N  WHY"
    assert printed(capsys, monkeypatch, 40, spared=("WHY",)) == [
        "NAME            N",
        "checkpoint-1    1",
        "checkpoint-22  22",
    ]


def test_a_cell_is_shortened_or_continues_below_itself(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert printed(capsys, monkeypatch, 40, shortened={"WHY": 10}) == [
        "NAME            N  WHY",
        "checkpoint-1    1  it is one of the l...",
        "checkpoint-22  22  it is the best",
    ]
    assert printed(capsys, monkeypatch, 40, folded={"WHY": 10}) == [
        "NAME            N  WHY",
        "checkpoint-1    1  it is one of the last",
        "                   two",
        "checkpoint-22  22  it is the best",
    ]


def test_a_name_is_never_cut_even_where_there_is_no_room(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    output.table(HEAD, [("checkpoint-" + "1" * 50, "1", "so it is")], folded={"WHY": 8})
    assert capsys.readouterr().out.splitlines()[1].startswith("checkpoint-" + "1" * 50)


def test_colours_do_not_count_as_width(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [("yes", "a"), ("damaged", "b")]
    output.table(("EXACT", "X"), rows, states=("EXACT",))
    plain = capsys.readouterr().out
    monkeypatch.setenv("FORCE_COLOR", "1")
    output.table(("EXACT", "X"), rows, states=("EXACT",))
    painted = capsys.readouterr().out
    assert painted.count("\x1b[0m") == 2
    for code in ("32", "31", "0"):
        painted = painted.replace(f"\x1b[{code}m", "")
    assert painted == plain


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("one two three", ["one two", "  three"]),
        ("paused. To: lastcall resume runs/exp1", ["paused.", "  To:", "  lastcall resume runs/exp1"]),
        ("a /very/long/path/that/is/pasted b", ["a", "  /very/long/path/that/is/pasted", "  b"]),
        ("stop it: lastcall pause x --wait; or not", ["stop it:", "  lastcall pause x --wait;", "  or not"]),
        ("", [""]),
    ],
)  # fmt: skip
def test_a_sentence_breaks_between_words_and_never_in_what_is_pasted(text: str, lines: list[str]) -> None:
    assert output.wrapped(text, 9, "  ") == lines


@given(st.lists(st.text("abc", min_size=1, max_size=9), min_size=1), st.integers(20, 60))
def test_no_word_is_lost_and_no_line_too_long(words: list[str], room: int) -> None:
    lines = output.wrapped(" ".join(words), room, "    ")
    assert " ".join(lines).split() == words
    assert max(map(len, lines)) <= room


def test_a_value_continues_below_itself(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    output.pair("metrics", "loss 1, accuracy 2, perplexity 3", 12)
    assert capsys.readouterr().out.splitlines() == [
        "  metrics      loss 1, accuracy 2,",
        "               perplexity 3",
    ]


def test_the_state_in_a_sentence_has_its_colour(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    output.say("runs/ok: ok (3 B)", state=": ok")
    output.say("runs/a has saved it", state="saved")
    assert capsys.readouterr().out == "runs/ok: ok (3 B)\nruns/a has \x1b[32msaved\x1b[0m it\n"
