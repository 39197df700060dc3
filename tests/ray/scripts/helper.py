"""A function that saves and reports, called in the branch; DDP; several batches an epoch; every rank enters
the branch."""

import os
import tempfile

import ray.train
import ray.train.torch
import task
import torch


def load_checkpoint(model, optimizer):
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        saved = torch.load(os.path.join(folder, "checkpoint.pt"), weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved["epoch"] + 1


def save_checkpoint(model, optimizer, epoch, metrics):
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if ray.train.get_context().get_world_rank() == 0:
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(saved, os.path.join(folder, "checkpoint.pt"))
            checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report(metrics, checkpoint=checkpoint)


def train_loop_per_worker(config):
    rank = ray.train.get_context().get_world_rank()
    model = ray.train.torch.prepare_model(task.new_model())
    optimizer = task.new_optimizer(model)
    start = load_checkpoint(model, optimizer)
    task.say(
        config, "start", updates=task.updates(optimizer), digest=task.digest(model, optimizer), epoch=start
    )
    for epoch in range(start, config["epochs"]):
        total = 0.0
        for inputs, targets in task.batches(epoch, config, rank):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            total += loss.item()
            task.say(config, "step", updates=task.updates(optimizer), digest=task.digest(model, optimizer))
        metrics = {"loss": total / config["batches"], "epoch": epoch}
        if (epoch + 1) % config["every"] == 0 or epoch == config["epochs"] - 1:
            save_checkpoint(model, optimizer, epoch, metrics)
        else:
            ray.train.report(metrics)
    task.say(config, "end", digest=task.digest(model, optimizer))


if __name__ == "__main__":
    given = task.arguments(epochs=30, batches=4, every=10)
    ray.train.torch.TorchTrainer(
        train_loop_per_worker,
        train_loop_config=given.config,
        scaling_config=given.scaling,
        run_config=given.run,
    ).fit()
