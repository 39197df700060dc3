"""`python bench/ray/pace.py FILE yes|no STORAGE`: the seconds of a step of two train workers, as rank 0 has
them, in pairs of blocks.

The second block of a pair has what is measured (get_preemption_info(), or the hooks of lastcall in this
process), the first has not.
"""

import contextlib
import json
import os
import sys
import tempfile
import time

import ray.train
import torch
from ray.train.torch import TorchTrainer, prepare_model
from torch.optim import optimizer as optimizers

PAIRS, STEPS = 30, 20


@contextlib.contextmanager
def no_hooks():
    """torch calls nothing before and after a step. There is no public way to take other people's hooks away
    for a while."""
    tables = (optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks)
    kept = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    yield
    for table, hooks in zip(tables, kept, strict=True):
        table.update(hooks)


def block(model, optimizer, data, asks):
    began = time.perf_counter()
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
        if asks:
            ray.train.get_preemption_info()
    return (time.perf_counter() - began) / STEPS


def train_func(config):
    model = prepare_model(torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.randn(8, 64)
    block(model, optimizer, data, config["asks"])  # the first steps make what the later ones find
    pairs = []
    for _ in range(PAIRS):
        with no_hooks():
            bare = block(model, optimizer, data, False)
        pairs.append((bare, block(model, optimizer, data, config["asks"])))
    rank = ray.train.get_context().get_world_rank()
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model.state_dict(), os.path.join(folder, "model.pt"))
        ray.train.report({}, checkpoint=ray.train.Checkpoint.from_directory(folder) if rank == 0 else None)
    if rank == 0:
        with open(config["out"], "w") as file:
            json.dump(pairs, file)


if __name__ == "__main__":
    out, asks, storage = sys.argv[1:]
    TorchTrainer(
        train_func,
        train_loop_config={"out": out, "asks": asks == "yes"},
        scaling_config=ray.train.ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.1}),
        run_config=ray.train.RunConfig(
            name=os.path.basename(out).removesuffix(".json"), storage_path=storage
        ),
    ).fit()
