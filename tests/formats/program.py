"""What made the checkpoints of this folder, and resumes from them. Once a version is released this may only
grow: an older checkpoint must still fit it.

    python program.py DIRECTORY [STOP]     STOP: the step in which it sends itself SIGTERM

With WORLD_SIZE in the environment (torchrun), or SHARDED, the model is sharded (FSDP2).
"""

import hashlib
import json
import os
import random
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import lastcall

directory, stop = sys.argv[1], int((*sys.argv, "0")[2])
sharded = "WORLD_SIZE" in os.environ or "SHARDED" in os.environ


def digest(tensors: dict[str, torch.Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name]
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        found.update(name.encode() + whole.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def state() -> dict[str, Any]:
    moments = {f"{n}.{key}": value for n, of in enumerate(opt.state.values()) for key, value in of.items()}
    values = {
        "weights": digest(model.state_dict()),
        "moments": digest(moments),
        "rate": opt.param_groups[0]["lr"],
    }
    return {**values, "seen": extra["seen"], "best": run.state["best"], "names": sorted(extra["names"])}


def say(**what: object) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(json.dumps(what), flush=True)


torch.manual_seed(3)
random.seed(3)
model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1))
if sharded:
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group(
            "gloo", init_method=f"file://{os.path.abspath(directory)}.store", rank=0, world_size=1
        )
    fully_shard(model)
opt = torch.optim.AdamW(model.parameters(), 1e-2)
sched = torch.optim.lr_scheduler.StepLR(opt, 4, gamma=0.5)
rows = torch.arange(24.0 * 6).reshape(24, 6) / 100
loader = DataLoader(TensorDataset(rows), batch_size=4, shuffle=True)
extra: dict[str, Any] = {"seen": 0, "names": {"a"}, "bytes": b"\x00\xff", "large": 2**70}

with lastcall.protect(
    directory, model=model, optimizer=opt, scheduler=sched, data=loader, extra=extra, best=(1, 2.5)
) as run:
    if run.resumed is not None:
        say(restored=run.resumed, **state())
    for _ in run.epochs(2):
        for (batch,) in run.batches(loader):
            loss = model(batch).square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            extra["seen"] += len(batch)
            extra["names"].add(str(run.step))
            run.report(loss=loss)
            if run.step + 1 == stop and run.resumed is None:
                os.kill(os.getpid(), signal.SIGTERM)
                while not run.stopping:
                    time.sleep(0.001)
            say(step=run.step + 1, batch=batch[:, 0].tolist(), drawn=random.random(), **state())
