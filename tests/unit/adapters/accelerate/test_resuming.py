"""Whether the same command would go on from a script's own save: what can be told from its source, its options and its command."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lastcall.adapters.accelerate import auto, resuming
from lastcall.core.save.budget import Budget
from lastcall.settings import JITCheckpointConfig
from lastcall.testing import FakeClock
from lastcall.types import Notice

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
            f"def main(args, accelerator, saved):\n    path = None\n    if not args: return ask()\n{lines}    return ask()\n"
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
    "one way of two": "if args.resume:\n    accelerator.load_state(args.resume)\nelif saved:\n    accelerator.load_state(saved[-1])",
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
@pytest.mark.parametrize("options", [argparse.Namespace(resume=None), Config()], ids=["argparse", "dataclass"])
def test_b3_an_option_that_is_not_given_keeps_the_same_command_from_resuming(ask: Ask, body: str, options: Any) -> None:
    """B3"""
    assert "keeps it from load_state() (script" in ask(body, options)
    assert ask(body, options, ("--resume", "latest")) == "", "a script may put it back where it finds nothing"


def test_b3_what_the_command_names_is_where_it_begins_again(ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B3"""
    folder = str(tmp_path / "step_5")
    assert f"the command names {folder}" in ask("accelerator.load_state(path)", None, ("--resume", folder), folder)
    assert f"the command names {folder}" in ask("accelerator.load_state(path)", None, (f"--resume={folder}",), folder)
    assert ask("accelerator.load_state(path)", None, ("--resume", "latest"), folder) == ""
    assert ask("pass") == "the script never calls load_state()"
    monkeypatch.setenv("LASTCALL_HANDS_OVER", "1")
    assert ask("pass") == "" == ask("accelerator.load_state(path)", None, ("--resume", folder), folder)


@pytest.mark.parametrize(
    ("wait", "left", "waited"), [(3.0, 30.0, 3.0), (3.0, 2.0, 0.75), (10.0, 12.0, 10.0), (10.0, 6.0, 4.75), (3.0, 0.5, 0.0)]
)
def test_b12_the_kill_wait_is_cut_by_the_notices_own_deadline(wait: float, left: float, waited: float) -> None:
    """B12: as in core.budget, not by a third of a grace that the notice does not give."""
    watch = auto.Watch(JITCheckpointConfig(kill_wait=wait, grace=3600.0))
    clock = FakeClock()
    watch._budget = Budget(clock)
    watch._notice = Notice("cloud", "spot", clock.now(), clock.now() + left)
    assert watch._kill_wait() == waited
    watch._notice = Notice("cloud", "spot", clock.now(), clock.now())
    assert watch._kill_wait() == 0.0, "a second notice leaves no time"


def test_b12_a_second_notice_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """B12"""
    watch = auto.Watch(JITCheckpointConfig(kill_wait=600.0, grace=3600.0))
    monkeypatch.setattr(auto.exits, "die_of", lambda signum: None)
    now = time.monotonic()
    watch._take(Notice("cloud", "spot", now, now + 3600.0))
    watch._take(Notice("cloud", "spot", now, now + 0.1))
    deadline = time.monotonic() + 30
    while watch._target is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert watch._target == 1
