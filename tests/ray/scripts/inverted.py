"""The branch leaves the pass early where nothing is due; what saves stands below it, in no branch at all."""

import os
import tempfile

import ray.train
import task
import torch
from ray.train.torch import TorchTrainer, prepare_model


def maybe_save(model, optimizer, step, every, loss):
    if (step + 1) % every != 0:
        return
    with tempfile.TemporaryDirectory() as path:
        if ray.train.get_context().get_world_rank() != 0:
            ray.train.report({"loss": loss})
            return
        torch.save((model.state_dict(), optimizer.state_dict(), step), os.path.join(path, "all.pt"))
        ray.train.report({"loss": loss}, checkpoint=ray.train.Checkpoint.from_directory(path))


def train_func(config):
    model = prepare_model(task.new_model())
    optimizer = task.new_optimizer(model)
    rank = ray.train.get_context().get_world_rank()
    first = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as path:
            weights, moments, last = torch.load(os.path.join(path, "all.pt"))
        model.load_state_dict(weights)
        optimizer.load_state_dict(moments)
        first = last + 1
    task.say(
        config, "start", updates=task.updates(optimizer), digest=task.digest(model, optimizer), step=first
    )
    for step in range(first, config["steps"]):
        task.compute(config)
        inputs, targets = task.batch(step, rank)
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        task.say(config, "step", updates=task.updates(optimizer), digest=task.digest(model, optimizer))
        maybe_save(model, optimizer, step, config["every"], loss.item())
    task.say(config, "end", digest=task.digest(model, optimizer))


if __name__ == "__main__":
    given = task.arguments(steps=120, every=100)
    TorchTrainer(
        train_func, train_loop_config=given.config, scaling_config=given.scaling, run_config=given.run
    ).fit()
