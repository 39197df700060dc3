"""Whether the same command would go on from a script's own save: what can be told from its source, its
options and its command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from lastcall.adapters.accelerate import resuming

Ask = Callable[..., str]


@dataclass
class Config:
    resume: str | None = None


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    monkeypatch.delenv("LASTCALL_HANDS_OVER", raising=False)

    def asked(body: str, args: Any = None, argv: tuple[str, ...] = (), loaded: str | None = None) -> str:
        """`body`: what a script does before its loop."""
        script = tmp_path / f"script{len(list(tmp_path.iterdir()))}.py"
        lines = "".join(f"    {line}\n" for line in body.splitlines())
        script.write_text(
            f"def main(args, accelerator, saved):\n    path = None\n    if not args: return ask()\n{lines}   "
            " return ask()\n"
        )
        scope: dict[str, Any] = {"ask": lambda: resuming.why_not(sys._getframe(1), loaded, argv)}
        exec(compile(script.read_text(), str(script), "exec"), scope)
        monkeypatch.setattr(resuming, "_sources", lambda frames: [str(script)])
        accelerator = argparse.Namespace(load_state=lambda path: None)
        return str(scope["main"](args or argparse.Namespace(resume=None), accelerator, []))

    return asked


BY_ITSELF = {
    "what lies in a folder": "if saved:\n    accelerator.load_state(saved[-1])",
    "a call": "if len(saved) > 0:\n    accelerator.load_state(saved[-1])",
    "always": "accelerator.load_state(path)",
    "one way of two": "if args.resume:\n    accelerator.load_state(args.resume)\nelif saved:\n    "
    "accelerator.load_state(saved[-1])",
    "unless it is told not to": "if not args.resume:\n    accelerator.load_state(path)",
}


@pytest.mark.parametrize("body", BY_ITSELF.values(), ids=list(BY_ITSELF))
def test_a_script_that_finds_its_checkpoints_by_itself_is_trusted(ask: Ask, body: str) -> None:
    assert ask(body) == ""


BY_OPTION = {
    "an option": "if args.resume:\n    accelerator.load_state(args.resume)",
    "is not None": "if args.resume is not None:\n    accelerator.load_state(args.resume)",
    "nested": "if args.resume:\n    if saved:\n        accelerator.load_state(args.resume)",
    "and": "if args.resume and args.resume != '':\n    accelerator.load_state(args.resume)",
    "else": "if args.resume is None:\n    pass\nelse:\n    accelerator.load_state(args.resume)",
}


@pytest.mark.parametrize("body", BY_OPTION.values(), ids=list(BY_OPTION))
@pytest.mark.parametrize(
    "options", [argparse.Namespace(resume=None), Config()], ids=["argparse", "dataclass"]
)
def test_b3_an_option_that_is_not_given_keeps_the_same_command_from_resuming(
    ask: Ask, body: str, options: Any
) -> None:
    """B3"""
    assert "keeps it from load_state() (script" in ask(body, options)
    assert ask(body, options, ("--resume", "latest")) == "", "a script may put it back where it finds nothing"


def test_b3_what_the_command_names_is_where_it_begins_again(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B3"""
    folder = str(tmp_path / "step_5")
    assert f"the command names {folder}" in ask(
        "accelerator.load_state(path)", None, ("--resume", folder), folder
    )
    assert f"the command names {folder}" in ask(
        "accelerator.load_state(path)", None, (f"--resume={folder}",), folder
    )
    assert ask("accelerator.load_state(path)", None, ("--resume", "latest"), folder) == ""
    assert ask("pass") == "the script never calls load_state()"
    monkeypatch.setenv("LASTCALL_HANDS_OVER", "1")
    assert ask("pass") == "" == ask("accelerator.load_state(path)", None, ("--resume", folder), folder)


def test_a_folder_that_the_script_works_with_is_no_place_for_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def script(args: argparse.Namespace) -> FrameType:
        return sys._getframe()

    monkeypatch.chdir(tmp_path)
    folders = [tmp_path, *(tmp_path / name for name in ("given", "named", "other"))]
    assert [folder.mkdir(exist_ok=True) for folder in folders]
    frame = script(argparse.Namespace(out="given"))

    def used(folder: Path) -> bool:
        return resuming.works_with(str(folder), frame, ("--to=named",))

    # from Python 3.12 on a comprehension's variable is one of this frame, which is among the script's
    assert list(map(used, folders)) == [
        True,
        True,
        True,
        False,
    ]
