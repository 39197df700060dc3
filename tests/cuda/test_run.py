"""On a GPU: bit-identical resume with half precision, and rescues of device state while the main thread or
the stream is busy."""

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
directory, kill_at, where, fused = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4] == "fused"
torch.manual_seed(0)
torch.use_deterministic_algorithms(True)
model = torch.nn.Sequential(
    torch.nn.Linear(256, 256), torch.nn.BatchNorm1d(256), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(256, 1)
).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
scaler = torch.amp.GradScaler("cuda")
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
ema = {name: value.detach().clone() for name, value in model.state_dict().items()}
config = lastcall.JITCheckpointConfig(kill_wait=0.0)
with lastcall.protect(directory, config=config, model=model, optimizer=optimizer, scaler=scaler, scheduler=scheduler, ema=ema) as run:
    for step in run.steps(60):
        if step == kill_at:
            os.kill(os.getpid(), signal.SIGTERM)
            if where == "c-call":
                hashlib.pbkdf2_hmac("sha512", b"x", b"y", 60_000_000)
            elif where == "stream":
                torch.cuda._sleep(40_000_000_000)  # keeps the default stream busy for about 20 s
        optimizer.zero_grad()
        x = torch.randn(64, 256, device="cuda")
        if where == "stream" and step == kill_at:
            torch.cuda.synchronize()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).float().pow(2).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                ema[name].mul_(0.99).add_(value.detach(), alpha=0.01)
digest = hashlib.sha256()
for value in [*model.state_dict().values(), *ema.values(), torch.rand(4, device="cuda"), torch.rand(4)]:
    digest.update(value.detach().cpu().numpy().tobytes())
for entry in optimizer.state_dict()["state"].values():
    for value in entry.values():
        digest.update(value.detach().cpu().numpy().tobytes())
print(json.dumps({"digest": digest.hexdigest(), "resumed": run.resumed, "scale": scaler.get_scale(), "lr": scheduler.get_last_lr()}))
"""  # noqa: E501


def start(
    tmp_path: Path, directory: str, kill_at: int, where: str = "", fused: str = "foreach"
) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(tmp_path / directory), str(kill_at), where, fused]
    env = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONPATH": ":".join(path for path in sys.path if path)}
    return subprocess.run(command, capture_output=True, text=True, timeout=170, env={**os.environ, **env})


def finished(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    assert done.returncode == 0, done.stderr
    answer: dict[str, object] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


@pytest.mark.parametrize("fused", ["foreach", "fused"])
def test_a_half_precision_run_resumes_bit_for_bit(tmp_path: Path, fused: str) -> None:
    reference = finished(start(tmp_path, "reference", -1, fused=fused))
    for kill_at in (0, 17, 42):
        assert start(tmp_path, "run", kill_at, fused=fused).returncode == 75
        testing.assert_resumable(tmp_path / "run", exact=True)
    answer = finished(start(tmp_path, "run", -1, fused=fused))
    assert answer.pop("resumed") is not None
    reference.pop("resumed")
    assert answer == reference


@pytest.mark.parametrize("where", ["c-call", "stream"])
def test_device_state_is_rescued_while_the_training_thread_is_stuck(tmp_path: Path, where: str) -> None:
    reference = finished(start(tmp_path, "reference", -1))
    stopped = start(tmp_path, "run", 30, where)
    assert stopped.returncode == 75, stopped.stderr
    assert "rescued step 30" in stopped.stderr
    testing.assert_resumable(tmp_path / "run", 30, exact=True)
    answer = finished(start(tmp_path, "run", -1))
    assert answer.pop("resumed") == 30
    reference.pop("resumed")
    assert answer == reference
