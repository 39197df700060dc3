"""On a GPU: a notice while the first step compiles. The initial state is rescued, and the process leaves
before its deadline (C10)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SCRIPT = r"""
import sys
import torch
import lastcall
torch.manual_seed(0)
widths = [256 + 32 * n for n in range(24)]
layers = [layer for a, b in zip(widths, widths[1:]) for layer in (torch.nn.Linear(a, b), torch.nn.GELU())]
model = torch.nn.Sequential(*layers, torch.nn.Linear(widths[-1], 1)).cuda()
compiled = torch.compile(model, mode=sys.argv[2])
optimizer = torch.optim.AdamW(model.parameters())
config = lastcall.JITCheckpointConfig(kill_wait=0.0, grace=10.0)
with lastcall.protect(sys.argv[1], config=config, model=model, optimizer=optimizer) as run:
    for step in run.steps(3):
        if step == 0:
            print("compiling", flush=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = compiled(torch.randn(512, 256, device="cuda")).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize("mode", ["default", "max-autotune"])
def test_c10_a_notice_while_the_first_step_compiles_is_answered_in_time(tmp_path: Path, mode: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = {
        **os.environ,
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
    }
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "run"), mode],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    while "compiling" not in (line := process.stdout.readline()):
        assert line, "the training has ended"
    try:
        process.wait(2.0)
    except subprocess.TimeoutExpired:
        pass
    process.send_signal(signal.SIGTERM)
    try:
        output, _ = process.communicate(timeout=10.0)  # the platform kills at the deadline
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
    assert process.returncode == 75, output
    (record,) = [
        json.loads(path.read_text()) for path in (tmp_path / "run").glob("checkpoint-*/lastcall.json")
    ]
    assert record["step"] <= 3 and (record["exact"] or record["because"])
