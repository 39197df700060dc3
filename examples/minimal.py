"""The smallest protected training loop. Stop it with SIGTERM whenever you like, start it again, and it goes
on.

python examples/minimal.py [DIRECTORY]
"""

import sys

import torch

import lastcall

torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

directory = sys.argv[1] if len(sys.argv) > 1 else "runs/minimal"
with lastcall.protect(directory, model=model, optimizer=optimizer) as run:
    for _ in run.steps(1000):
        x = torch.randn(32, 8)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.report(loss=loss)

print(f"finished {run.step} steps, weights sum to {sum(p.sum().item() for p in model.parameters()):.6f}")
