from __future__ import annotations

import math
import time

import pytest

from lastcall.cli import output


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_999, "1.0 MB"),
        (1_500_000_000, "1.5 GB"),
        (2 * 10**12, "2.0 TB"),
        (3 * 10**18, "3000.0 PB"),
    ],
)
def test_sizes_are_in_units_that_people_read(nbytes: int, text: str) -> None:
    assert output.size(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0.00 s"),
        (0.126, "0.13 s"),
        (9.999, "10 s"),
        (119.4, "119 s"),
        (119.9, "2 min"),
        (7199, "2 h 00 min"),
        (3 * 3600 + 300, "3 h 05 min"),
        (50 * 3600, "2 d 2 h"),
        (math.nan, "?"),
        (math.inf, "?"),
    ],
)
def test_lengths_of_time_are_as_precise_as_they_are_short(seconds: float, text: str) -> None:
    assert output.duration(seconds) == text


def test_an_age_is_in_whole_seconds_and_a_clock_that_runs_ahead_is_told() -> None:
    assert output.age(100.0, 103.4) == "3 s ago"
    assert output.age(100.5, 100.0) == "0 s ago"
    assert output.age(1000.0, 100.0) == "in the future"


def test_a_moment_is_local_time_and_nonsense_is_no_error() -> None:
    assert output.moment(1.7e9) == time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(1.7e9))
    assert output.moment(1e300) == output.moment(math.nan) == "?"


def test_nothing_from_a_file_reaches_the_terminal_as_a_command() -> None:
    assert output.printable("SIGTERM\x1b[2J\n\x07 é") == "SIGTERM\\x1b[2J\\n\\x07 é"
    assert output.printable("\ud800") == "\\ud800"
