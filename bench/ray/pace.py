"""`python bench/ray/pace.py FILE yes|no STORAGE`: the seconds of a step of two train workers, block by block, on rank 0."""

import json
import os
import sys
import tempfile
import time

import ray.train
import torch
from ray.train.torch import TorchTrainer, prepare_model

BLOCKS, STEPS = 20, 50


def train_func(config):
    model = prepare_model(torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.randn(8, 64)
    times = []
    for _ in range(BLOCKS):
        began = time.perf_counter()
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()
            if config["asks"]:
                ray.train.get_preemption_info()
        times.append((time.perf_counter() - began) / STEPS)
        if len(times) == BLOCKS:
            with tempfile.TemporaryDirectory() as folder:
                torch.save(model.state_dict(), os.path.join(folder, "model.pt"))
                rank = ray.train.get_context().get_world_rank()
                ray.train.report({}, checkpoint=ray.train.Checkpoint.from_directory(folder) if rank == 0 else None)
    if ray.train.get_context().get_world_rank() == 0:
        with open(config["out"], "w") as file:
            json.dump(times[1:], file)


if __name__ == "__main__":
    out, asks, storage = sys.argv[1:]
    TorchTrainer(
        train_func,
        train_loop_config={"out": out, "asks": asks == "yes"},
        scaling_config=ray.train.ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.1}),
        run_config=ray.train.RunConfig(name=os.path.basename(out).removesuffix(".json"), storage_path=storage),
    ).fit()
