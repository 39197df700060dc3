"""The worked example: the notebook is the script, and the script does what it says, without a cluster."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

import lastcall.kubeflow
from helpers.kubeflow.local import OFFLINE
from helpers.processes.forkserver import ROOT

FOLDER = ROOT / "examples" / "kubeflow"


def test_the_notebook_is_the_script() -> None:
    made = runpy.run_path(str(FOLDER / "make_notebook.py"))
    script = (FOLDER / "jit_checkpointing.py").read_text()
    assert (FOLDER / "jit_checkpointing.ipynb").read_text() == made["notebook"](script), (
        "python examples/kubeflow/make_notebook.py"
    )
    cells = json.loads((FOLDER / "jit_checkpointing.ipynb").read_text())["cells"]
    headings = [cell["source"][0].strip() for cell in cells if cell["cell_type"] == "markdown"]
    assert [heading.removeprefix("## ") for heading in headings[1:]] == [
        "Stage the model and the data",
        "The training function",
        "Submit",
        "Pause",
        "Resume",
        "Verify",
        "Test the model",
        "Clean up",
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_example_is_paused_resumed_verified_tried_and_cleaned_up(
    wheels: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    torch, package = wheels
    (tmp_path / "shared").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LOCAL", "1")
    trainer = lastcall.kubeflow.TransformersTrainer
    offline = {
        "packages_to_install": [torch],
        "package": package,
        "env": OFFLINE,
        "enable_progress_tracking": False,
    }
    monkeypatch.setattr(
        lastcall.kubeflow, "TransformersTrainer", lambda **said: trainer(**{**said, **offline})
    )
    monkeypatch.setattr(sys, "argv", ["jit_checkpointing.py"])
    runpy.run_path(str(FOLDER / "jit_checkpointing.py"), run_name="__main__")
    said = capfd.readouterr().out
    assert (
        "[Kubeflow] JIT checkpointing enabled" in said and "[Kubeflow] Auto-resuming from checkpoint-" in said
    )
    assert "Boat number" in said and "'final'" in said
