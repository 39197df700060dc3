"""Saves when ten minutes have passed since the last one."""

import os
import tempfile
import time

import task
import torch
from ray import train
from ray.train.torch import TorchTrainer, prepare_model


def train_func(config):
    model = prepare_model(task.new_model())
    optimizer = task.new_optimizer(model)
    rank = train.get_context().get_world_rank()
    step = 0
    if (found := train.get_checkpoint()) is not None:
        with found.as_directory() as folder:
            data = torch.load(os.path.join(folder, "data.pt"))
        model.load_state_dict(data["model"])
        optimizer.load_state_dict(data["optimizer"])
        step = data["step"]
    task.say(
        config, "start", updates=task.updates(optimizer), digest=task.digest(model, optimizer), step=step
    )
    last_save = time.time()
    while step < config["steps"]:
        task.compute(config)
        inputs, targets = task.batch(step, rank)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        step += 1
        task.say(config, "step", updates=task.updates(optimizer), digest=task.digest(model, optimizer))
        if time.time() - last_save > 600:
            last_save = time.time()
            with tempfile.TemporaryDirectory() as folder:
                torch.save(
                    {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step},
                    os.path.join(folder, "data.pt"),
                )
                train.report(
                    {"loss": float(loss)},
                    checkpoint=train.Checkpoint.from_directory(folder) if rank == 0 else None,
                )
    task.say(config, "end", digest=task.digest(model, optimizer))


if __name__ == "__main__":
    given = task.arguments(steps=120)
    TorchTrainer(
        train_func, train_loop_config=given.config, scaling_config=given.scaling, run_config=given.run
    ).fit()
