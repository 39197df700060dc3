from __future__ import annotations

import os

import pytest

from lastcall.auto import environment


def test_our_folder_goes_in_front_of_what_the_user_has() -> None:
    assert environment.additions({"PYTHONPATH": "/a:/b"}) == {"PYTHONPATH": f"{environment.SITE}:/a:/b"}
    assert os.path.isfile(os.path.join(environment.SITE, "sitecustomize.py"))


@pytest.mark.parametrize("given", [{}, {"PYTHONPATH": ""}])
def test_without_a_path_no_empty_entry_is_added_since_it_would_be_the_working_directory(
    given: dict[str, str],
) -> None:
    assert environment.additions(given) == {"PYTHONPATH": environment.SITE}


def test_an_empty_entry_of_the_user_stays() -> None:
    assert environment.additions({"PYTHONPATH": ":/b"}) == {"PYTHONPATH": f"{environment.SITE}::/b"}


def test_a_launcher_below_a_launcher_adds_nothing() -> None:
    assert environment.additions(environment.additions({"PYTHONPATH": "/a"})) == {}


@pytest.mark.parametrize("word", ["0", "false", "No", " OFF "])
def test_nothing_is_added_when_it_was_switched_off(word: str) -> None:
    assert environment.additions({"LASTCALL_ENABLED": word, "PYTHONPATH": "/a"}) == {}


def test_a_folder_that_the_variable_cannot_express_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "SITE", "/odd:name/site")
    assert environment.additions({"PYTHONPATH": "/a"}) == {}
