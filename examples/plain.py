"""Plain PyTorch, slow enough to be taken away in the middle: what `lastcall drill` is tried on.

    python examples/plain.py [DIRECTORY] [--steps 4000]
    lastcall drill --times 5 -- python examples/plain.py

A step takes 25 ms, most of it asleep, so that 4000 of them last for five rounds of a drill. To begin anew: rm
-r runs/plain
"""

import argparse
import time

import torch

import lastcall

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("directory", nargs="?", default="runs/plain", help="where checkpoints are kept")
parser.add_argument("--steps", type=int, default=4000)
args = parser.parse_args()

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(
    torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(256, 1)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)

with lastcall.protect(args.directory, model=model, optimizer=optimizer, scheduler=scheduler) as run:
    for step in run.steps(args.steps):
        x = torch.randn(64, 64)
        loss = (model(x) - x.square().mean(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        run.report(loss=loss)
        time.sleep(0.024)
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}/{args.steps} loss {loss.item():.4f}", flush=True)

print(f"finished {run.step} steps, weights sum to {sum(p.sum().item() for p in model.parameters()):.6f}")
