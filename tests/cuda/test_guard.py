"""On a GPU: what the guardian finds after a kill is the whole boundary, work that was only launched by then
included."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lastcall import testing

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SCRIPT = r"""
import hashlib, json, os, signal, sys, time
import torch
import lastcall
directory, kill_at = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
layers = torch.nn.Linear(1024, 4096), torch.nn.BatchNorm1d(4096), torch.nn.Dropout(0.1), torch.nn.Linear(4096, 1)
model = torch.nn.Sequential(*layers).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
ema = {name: value.detach().clone() for name, value in model.state_dict().items()}
config = lastcall.JITCheckpointConfig(guard=True, guard_steps=5)
with lastcall.protect(directory, config=config, model=model, optimizer=optimizer, ema=ema) as run:
    for step in run.steps(400):
        optimizer.zero_grad()
        model(torch.randn(64, 1024, device="cuda")).pow(2).mean().backward()
        optimizer.step()
        torch.cuda._sleep(4_000_000)  # the average below is launched, and runs 2 ms later
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                ema[name].mul_(0.9).add_(value.detach(), alpha=0.1)
        if step == kill_at:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
digest = hashlib.sha256()
for value in [*model.state_dict().values(), *ema.values(), torch.rand(4, device="cuda")]:
    digest.update(value.detach().cpu().numpy().tobytes())
print(json.dumps({"digest": digest.hexdigest(), "resumed": run.resumed}))
"""  # noqa: E501


def start(tmp_path: Path, directory: str, kill_at: int) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    env = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONPATH": ":".join(path for path in sys.path if path)}
    command = [sys.executable, str(script), str(tmp_path / directory), str(kill_at)]
    return subprocess.run(command, capture_output=True, text=True, timeout=170, env={**os.environ, **env})


def test_killed_on_a_gpu_a_guarded_run_ends_bit_for_bit(tmp_path: Path) -> None:
    reference = start(tmp_path, "reference", -1)
    assert reference.returncode == 0, reference.stderr
    for kill_at in (201, 302, 353):
        killed = start(tmp_path, "run", kill_at)
        assert killed.returncode == -9, killed.stderr
    last = start(tmp_path, "run", -1)
    assert last.returncode == 0, last.stderr
    assert "from shared memory" in last.stderr
    testing.assert_resumable(tmp_path / "run")
    answer, expected = json.loads(last.stdout), json.loads(reference.stdout)
    assert answer["resumed"] >= 345
    assert answer["digest"] == expected["digest"]
