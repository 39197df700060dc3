"""Saves nothing and loads nothing."""

import task
import torch
from ray import train
from ray.train.torch import TorchTrainer, prepare_model


def train_func(config):
    model = prepare_model(task.new_model())
    optimizer = task.new_optimizer(model)
    for step in range(config["steps"]):
        task.compute(config)
        inputs, targets = task.batch(step, train.get_context().get_world_rank())
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        if step == 0:
            task.say(config, "start", updates=0, digest=task.digest(model))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        task.say(config, "step", updates=task.updates(optimizer), digest=task.digest(model))
        if step % 10 == 0:
            train.report({"loss": loss.item()})
    task.say(config, "end", digest=task.digest(model))


if __name__ == "__main__":
    given = task.arguments(steps=120)
    TorchTrainer(train_func, train_loop_config=given.config, scaling_config=given.scaling, run_config=given.run).fit()
