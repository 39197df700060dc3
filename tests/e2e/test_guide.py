"""The loops of docs/guide.md and of README.md, copied as they stand: preempted, resumed, and the same as
undisturbed."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from helpers.processes import interruption_chain as chain
from helpers.processes.forkserver import ROOT, Child, Nursery


def python_of(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


GUIDE = python_of(ROOT / "docs" / "guide.md")
LOOPS, (CARRY, CONFIGURED) = GUIDE[:3], GUIDE[3:]
SETTING = """
import copy, os, signal, torch, lastcall
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
opt = torch.optim.Adam(model.parameters(), 1e-2)
loader = DataLoader(TensorDataset(torch.arange(24.0).reshape(-1, 1)), batch_size=4, shuffle=True)
ema = {"mean": torch.zeros(())}
counters = {"seen": 0}

def work():
    loss = model(torch.rand(4, 1)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if run.step == int(os.environ.get("STOP", -1)) and run.resumed is None:
        os.kill(os.getpid(), signal.SIGTERM)
        while not run._driver.session.open:
            pass

"""
END = """
print("rate", opt.param_groups[0]["lr"])
print("weights", [value.tolist() for value in model.parameters()])
"""


def lived(nursery: Nursery, folder: Path, block: str, **env: str) -> Child:
    folder.mkdir(exist_ok=True)
    setting = SETTING + (
        "sched = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)\n" if "sched" in block else ""
    )
    body = block.replace("10_000", "12").replace("runs/exp1", str(folder / "run"))
    body = re.sub(r"^( *)\.\.\.$", r"\1work()", body, flags=re.MULTILINE)
    child = nursery.run(
        folder,
        nursery.write(folder, textwrap.dedent(setting + body + END)),
        LASTCALL_KILL_WAIT_SECONDS="0",
        **env,
    )
    assert child.code == (chain.SAVED if "STOP" in env else 0), child.log()
    return child


@pytest.mark.parametrize("number", range(3))
def test_f4_a_loop_of_the_guide_copied_as_it_stands_resumes_the_same(
    nursery: Nursery, tmp_path: Path, number: int
) -> None:
    """F4: the second one stepped a scheduler that it did not hand over."""
    whole = lived(nursery, tmp_path / "whole", LOOPS[number])
    lived(nursery, tmp_path / "cut", LOOPS[number], STOP="8")
    again = lived(nursery, tmp_path / "cut", LOOPS[number])
    assert again.lines() == whole.lines()
    assert "WARNING" not in again.log() + whole.log()


def test_the_other_blocks_of_the_guide_resume_the_same(nursery: Nursery, tmp_path: Path) -> None:
    """`run.carry` in a loop of its own, and the settings of the run that it stands in."""
    head, tail = CONFIGURED.rsplit("    ...\n", 1)
    loss = "    loss = model(torch.rand(4, 1)).square().mean().item()\n"
    inside = textwrap.indent(CARRY.replace("    ...\n", f"    ...\n{loss}"), "    ")
    block = f"import math\n{head}{inside}{tail}print('best', state.best)\n".replace(
        "kill_wait=5", "kill_wait=0"
    )
    whole = lived(nursery, tmp_path / "whole", block)
    lived(nursery, tmp_path / "cut", block, STOP="8")
    again = lived(nursery, tmp_path / "cut", block)
    assert again.lines() == whole.lines()


def test_the_ten_lines_of_the_readme_resume_the_same(nursery: Nursery, tmp_path: Path) -> None:
    (block,) = python_of(ROOT / "README.md")
    named = (
        "optimizer = opt\n"
        "loader = DataLoader(torch.arange(16.0).reshape(-1, 1), batch_size=4, shuffle=True)\n"
    )
    stop = """            if run.step == int(os.environ.get("STOP", -1)) and run.resumed is None:
                os.kill(os.getpid(), signal.SIGTERM)
                while not run.stopping:
                    pass
"""
    report = "            run.report(loss=loss)\n"
    assert report in block
    block = named + block.replace(report, report + stop)
    whole = lived(nursery, tmp_path / "whole", block)
    lived(nursery, tmp_path / "cut", block, STOP="6")
    again = lived(nursery, tmp_path / "cut", block)
    assert again.lines() == whole.lines()
    assert "WARNING" not in again.log() + whole.log()
