"""A script without a save of its own, with one line of lastcall's."""

import ray.train.torch
import task
import torch
from ray.train.torch import TorchTrainer

import lastcall.ray


def train_loop(config):
    model = ray.train.torch.prepare_model(task.new_model())
    optimizer = task.new_optimizer(model)
    progress = {"step": 0}
    lastcall.ray.protect(model=model.module, optimizer=optimizer, progress=progress)
    rank = ray.train.get_context().get_world_rank()
    task.say(config, "start", updates=task.updates(optimizer), digest=task.digest(model, optimizer))
    while progress["step"] < config["steps"]:
        task.compute(config)
        inputs, targets = task.batch(progress["step"], rank)
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        progress["step"] += 1
        task.say(config, "step", updates=task.updates(optimizer), digest=task.digest(model, optimizer))
    task.say(config, "end", digest=task.digest(model, optimizer))


if __name__ == "__main__":
    given = task.arguments(steps=120)
    TorchTrainer(
        train_loop, train_loop_config=given.config, scaling_config=given.scaling, run_config=given.run
    ).fit()
