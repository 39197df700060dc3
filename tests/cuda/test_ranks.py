"""Two ranks on one GPU (gloo moves its tensors): a notice and a kill, and the run goes on as if nothing had
happened."""

from __future__ import annotations

import os
import re
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

SCRIPT = """
import hashlib, os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
import lastcall

def say(line):
    os.write(1, f"{line}\\n".encode())  # in one piece: below torchrun a print() is two writes, and the other rank's come in between

torch.use_deterministic_algorithms(True)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(256, 8)).cuda()
ddp = DDP(model)
optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
torch.manual_seed(100 + rank)
with lastcall.protect(sys.argv[1], model=ddp, optimizer=optimizer) as run:
    for step in run.steps(40):
        optimizer.zero_grad()
        ddp(torch.randn(16, 64, device="cuda")).square().mean().backward()
        optimizer.step()
        say(f"step {rank} {step + 1} {os.getpid()}")
        time.sleep(0.05)
digest = hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())).hexdigest()
say(f"end {rank} {digest}")
"""  # noqa: E501


def start(folder: Path, directory: str, enabled: str = "1") -> subprocess.Popen[str]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        str(script),
        str(folder / directory),
    ]
    env = {
        **os.environ,
        "LASTCALL_ENABLED": enabled,
        "LASTCALL_KILL_WAIT_SECONDS": "0",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ends(output: str) -> dict[str, str]:
    return dict(re.findall(r"end (\d) (\w+)", output))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    output, _ = start(tmp_path_factory.mktemp("reference"), "off", "0").communicate(timeout=150)
    assert len(ends(output)) == 2, output
    return ends(output)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_two_ranks_on_a_gpu_go_on_after_a_signal_to_one(
    tmp_path: Path, expected: dict[str, str], signum: int
) -> None:
    process = start(tmp_path, "run")
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if (found := re.match(r"step 1 (\d+) (\d+)", line)) and int(found[1]) >= 12:
            os.kill(int(found[2]), signum)
            break
    rest, _ = process.communicate(timeout=100)
    first = "".join(lines) + rest
    assert "saved checkpoint-" in first, first
    again, _ = start(tmp_path, "run").communicate(timeout=150)
    assert "Resuming from checkpoint-1" in again, again
    assert ends(again) == expected, first + again
