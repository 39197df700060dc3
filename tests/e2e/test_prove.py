"""`lastcall drill --prove` on real commands: two runs in scratch directories, compared piece by piece."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from helpers.drill import harness

LOOP = """
import sys
import torch
import lastcall

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(40, 8)), 4, shuffle=True)
state = {"model": model, "optimizer": optimizer}
if "without-scheduler" not in sys.argv:
    state["scheduler"] = scheduler
with lastcall.protect("runs/mine", **state) as run:
    for epoch in run.epochs(3):
        for (x,) in run.batches(loader):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            run.report(loss=loss)
"""
TICKS = """
import torch
import lastcall

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
with lastcall.protect("runs/mine", model=model, optimizer=optimizer) as run:
    batch = torch.randn(4, 8)
    while run.step < 100:
        loss = model(batch).square().mean()
        batch = torch.randn(4, 8)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.tick()
"""
RANKS = """
import torch
import torch.distributed as dist
import lastcall

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.utils.data.TensorDataset(torch.randn(64, 4))
sampler = torch.utils.data.DistributedSampler(data)
loader = torch.utils.data.DataLoader(data, 4, sampler=sampler)
with lastcall.protect("runs/mine", model=model, optimizer=optimizer) as run:
    for epoch in run.epochs(3):
        sampler.set_epoch(epoch)
        for (x,) in run.batches(loader):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.report(loss=loss)
dist.destroy_process_group()
"""


def prove(
    folder: Path,
    source: str,
    *words: str,
    launcher: tuple[str, ...] = (sys.executable,),
    options: tuple[object, ...] = (),
) -> Any:
    (folder / "train.py").write_text(source)
    return harness.drill(folder, "--prove", *options, "--", *launcher, "train.py", *words)


def test_a_loop_is_identical_and_its_own_directory_is_not_touched(tmp_path: Path) -> None:
    done = prove(tmp_path, LOOP, options=("--steps", 12, "--times", 2, "--json"))
    assert done.returncode == 0, done.stdout + done.stderr
    body = harness.reported(done)
    assert body["identical"] and body["problem"] is None and body["steps"] == 12
    assert [one["exact"] for one in body["resumed"]] == [True, True]
    assert body["compared"] >= 6 and body["names"] > 20 and body["differences"] == []
    assert not (tmp_path / "runs").exists()


def test_a_scheduler_that_was_not_handed_over_is_found(tmp_path: Path) -> None:
    done = prove(tmp_path, LOOP, "without-scheduler", options=("--steps", 10))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "DIFFERENT from step" in done.stdout and "optimizer.groups.0.lr is" in done.stdout
    assert "Probably missing" in done.stdout and "scheduler" in done.stdout.partition("Probably missing")[2]


def test_a_loop_of_the_scripts_own_with_a_batch_fetched_ahead_is_identical(tmp_path: Path) -> None:
    done = prove(tmp_path, TICKS, options=("--steps", 8))
    assert done.returncode == 0 and "Identical after 8 steps" in done.stdout, done.stdout + done.stderr


def test_two_ranks_under_torchrun_are_identical(tmp_path: Path) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    done = prove(tmp_path, RANKS, launcher=torchrun, options=("--steps", 10, "--json"))
    assert done.returncode == 0, done.stdout + done.stderr
    body = harness.reported(done)
    assert body["identical"] and body["compared"] >= 8


def test_a_command_that_is_not_protected_and_options_that_do_not_fit_are_told(tmp_path: Path) -> None:
    done = harness.drill(tmp_path, "--prove", "--", sys.executable, "-c", "pass")
    assert done.returncode == 1 and "no process below it has used lastcall" in done.stdout
    for words in (
        ("--steps", 5),
        ("--prove", "--after", 1),
        ("--prove", "--to-the-end"),
        ("--prove", "--steps", "many"),
    ):
        done = harness.drill(tmp_path, *words, "--", sys.executable, "-c", "pass")
        assert done.returncode == 78, (words, done.stderr)
