"""Saves nothing itself; one line names what lastcall keeps."""

import task
import torch
from ray import train
from ray.train.torch import TorchTrainer, prepare_model

import lastcall.ray


def train_func(config):
    model = prepare_model(task.new_model())
    optimizer = task.new_optimizer(model)
    progress = {"step": 0}
    lastcall.ray.protect(model=model, optimizer=optimizer, progress=progress)
    task.say(config, "start", updates=task.updates(optimizer), digest=task.digest(model, optimizer), step=progress["step"])
    while progress["step"] < config["steps"]:
        task.compute(config)
        inputs, targets = task.batch(progress["step"], train.get_context().get_world_rank())
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        progress["step"] += 1
        task.say(config, "step", updates=task.updates(optimizer), digest=task.digest(model, optimizer))
    task.say(config, "end", digest=task.digest(model, optimizer))


if __name__ == "__main__":
    given = task.arguments(steps=120)
    TorchTrainer(train_func, train_loop_config=given.config, scaling_config=given.scaling, run_config=given.run).fit()
