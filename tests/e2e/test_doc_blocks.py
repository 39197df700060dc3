"""Commands of the pages, run word for word."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from helpers.docs import blocks as doc_blocks
from helpers.processes import interruption_chain as chain
from helpers.processes.forkserver import ROOT, Nursery

PROGRAMS = Path(sys.executable).parent
STAGED = {"commands.md", "export.md"}  # pages that speak of a run in runs/exp1
RUN = sorted(
    {block.page for page in doc_blocks.PAGES for block in doc_blocks.blocks(page) if block.mark == "run"}
)
STAGE = """
import os, signal, sys, time, torch, lastcall
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
periodic = lastcall.PeriodicCheckpointConfig(save_steps=100)
with lastcall.protect("runs/exp1", periodic=periodic, model=model, optimizer=optimizer) as run:
    for step in run.steps(2000):
        while step in (700, 800) and not os.path.exists(f"runs/exp1/checkpoint-{step}"):
            time.sleep(0.001)  # written beside the training; the pages name it
        loss = model(torch.rand(2, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.report(loss=loss)
        if step + 1 == int(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGTERM)
            while not run.stopping:
                time.sleep(0.001)
"""


@pytest.fixture
def staged(nursery: Nursery, tmp_path: Path) -> Path:
    """A folder with runs/exp1, preempted at step 725 and again at step 817."""
    folder = tmp_path / "staged"
    folder.mkdir()
    script = nursery.write(folder, STAGE)
    for stop in (725, 817):
        child = nursery.run(folder, script, stop, LASTCALL_KILL_WAIT_SECONDS="0")
        assert child.code == chain.SAVED, child.log()
    shutil.rmtree(folder / "runs" / "exp1" / ".lastcall" / "staging", ignore_errors=True)
    return folder


def test_there_are_pages_to_run() -> None:
    assert {"tutorial.md", *STAGED} <= {page.name for page in RUN}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_the_commands_of_a_page_work_as_they_stand(
    page: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue("staged") if page.name in STAGED else tmp_path / "work"
    folder.mkdir(exist_ok=True)
    said = doc_blocks.run(page, folder, PROGRAMS)
    if page.name == "tutorial.md":
        assert "exit code 75" in said and "Resuming from checkpoint-" in said and "Identical after" in said, (
            said
        )
        assert "step 200" in said and f"{ROOT}" not in said, said
