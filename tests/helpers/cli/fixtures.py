"""Run directories with really committed checkpoints, made without a framework, and the command line in this
process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.cli.harness import Cli, MakeRun, Said
from helpers.core.bare_core import State, World
from lastcall.cli import main
from lastcall.core.engine import writer
from lastcall.core.save import saver
from lastcall.types import Kind


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    def call(*arguments: object) -> Said:
        capsys.readouterr()
        code = main.main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return Said(code, said.out, said.err)

    return call


@pytest.fixture
def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeRun:
    monkeypatch.setattr(writer, "CHUNK", 8192)

    def make(
        name: str, *steps: int, kind: Kind = Kind.PERIODIC, reason: str = "test", **capture: Any
    ) -> Path:
        """Commit these steps. The metric `loss` is a hundredth of the step unless metrics are given."""
        root, state = tmp_path / name, State(seed=1)
        with World(root) as world:
            for step in steps:
                state.step(step)
                made = state.capture(step, **{"metrics": {"loss": step / 100}, **capture})
                world.saver.save(made, saver.Request(kind, reason))
        return root

    return make
