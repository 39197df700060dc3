"""Rank and period in one condition, in a with statement that surrounds both; one report for all ranks."""

import os
from tempfile import TemporaryDirectory

import task
import torch
from ray import train
from ray.train import Checkpoint
from ray.train.torch import TorchTrainer, prepare_model


def train_func(config):
    model = prepare_model(task.new_model())
    optimizer = task.new_optimizer(model)
    rank = train.get_context().get_world_rank()
    start_epoch = 0
    checkpoint = train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as ckpt_dir:
            model.module.load_state_dict(torch.load(os.path.join(ckpt_dir, "model.pt")))
            optimizer.load_state_dict(torch.load(os.path.join(ckpt_dir, "optimizer.pt")))
            start_epoch = torch.load(os.path.join(ckpt_dir, "extra_state.pt"))["epoch"] + 1
    task.say(
        config,
        "start",
        updates=task.updates(optimizer),
        digest=task.digest(model, optimizer),
        epoch=start_epoch,
    )

    for epoch in range(start_epoch, config["epochs"]):
        for batch, labels in task.batches(epoch, config, rank):
            loss = torch.nn.functional.mse_loss(model(batch), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            task.say(config, "step", updates=task.updates(optimizer), digest=task.digest(model, optimizer))
        with TemporaryDirectory() as temp_checkpoint_dir:
            checkpoint = None
            if rank == 0 and epoch % 10 == 0:
                torch.save(model.module.state_dict(), os.path.join(temp_checkpoint_dir, "model.pt"))
                torch.save(optimizer.state_dict(), os.path.join(temp_checkpoint_dir, "optimizer.pt"))
                torch.save({"epoch": epoch}, os.path.join(temp_checkpoint_dir, "extra_state.pt"))
                checkpoint = Checkpoint.from_directory(temp_checkpoint_dir)
            train.report({"loss": loss.item()}, checkpoint=checkpoint)
    task.say(config, "end", digest=task.digest(model, optimizer))


if __name__ == "__main__":
    given = task.arguments(epochs=30, batches=4)
    TorchTrainer(
        train_func, train_loop_config=given.config, scaling_config=given.scaling, run_config=given.run
    ).fit()
