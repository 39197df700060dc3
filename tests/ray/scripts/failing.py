"""Raises an exception of its own in the middle of the training."""

import tempfile

import task
import torch
from ray import train
from ray.train.torch import TorchTrainer


def train_func(config):
    model = task.new_model()
    optimizer = task.new_optimizer(model)
    task.say(config, "start", updates=0, digest=task.digest(model, optimizer))
    for step in range(100):
        task.compute(config)
        inputs, targets = task.batch(step)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        task.say(config, "step", updates=step + 1, digest=task.digest(model, optimizer))
        if step == 8:
            raise RuntimeError("the ninth step is too much")
        if step % 50 == 49:
            with tempfile.TemporaryDirectory() as folder:
                torch.save(model.state_dict(), f"{folder}/model.pt")
                train.report({}, checkpoint=train.Checkpoint.from_directory(folder))


if __name__ == "__main__":
    given = task.arguments()
    TorchTrainer(
        train_func, train_loop_config=given.config, scaling_config=given.scaling, run_config=given.run
    ).fit()
