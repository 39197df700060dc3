"""Epochs that are longer than the grace: the save at the end of one is too far away when a notice comes."""

import os
import tempfile

import ray.train
import ray.train.torch
import task
import torch
from ray.train import Checkpoint
from ray.train.torch import TorchTrainer


def train_loop(config):
    model = ray.train.torch.prepare_model(task.new_model())
    optimizer = task.new_optimizer(model)
    start_epoch = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            saved = torch.load(os.path.join(folder, "state.pt"))
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start_epoch = saved["epoch"] + 1
    rank = ray.train.get_context().get_world_rank()
    task.say(
        config,
        "start",
        updates=task.updates(optimizer),
        digest=task.digest(model, optimizer),
        epoch=start_epoch,
    )

    for epoch in range(start_epoch, config["epochs"]):
        for inputs, targets in task.batches(epoch, config, rank):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            task.say(config, "step", updates=task.updates(optimizer), digest=task.digest(model, optimizer))
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if epoch % 10 == 0 and rank == 0:
                state = {
                    "model": model.module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "epoch": epoch,
                }
                torch.save(state, os.path.join(folder, "state.pt"))
                checkpoint = Checkpoint.from_directory(folder)
            ray.train.report({"loss": loss.item()}, checkpoint=checkpoint)
    task.say(config, "end", digest=task.digest(model, optimizer))


if __name__ == "__main__":
    given = task.arguments(epochs=2, batches=200)
    TorchTrainer(
        train_loop, train_loop_config=given.config, scaling_config=given.scaling, run_config=given.run
    ).fit()
