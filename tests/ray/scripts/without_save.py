"""A script that saves nothing at all."""

import ray.train.torch
import task
import torch
from ray.train.torch import TorchTrainer


def train_loop(config):
    model = ray.train.torch.prepare_model(task.new_model())
    optimizer = task.new_optimizer(model)
    rank = ray.train.get_context().get_world_rank()
    task.say(config, "start", updates=task.updates(optimizer), digest=task.digest(model, optimizer))
    for step in range(config["steps"]):
        task.compute(config)
        inputs, targets = task.batch(step, rank)
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        before = task.digest(model.module)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        weights = task.digest(model.module)
        task.say(
            config,
            "step",
            updates=task.updates(optimizer),
            digest=task.digest(model, optimizer),
            before=before,
            weights=weights,
        )
    task.say(config, "end", digest=task.digest(model, optimizer))


if __name__ == "__main__":
    given = task.arguments(steps=120)
    TorchTrainer(
        train_loop, train_loop_config=given.config, scaling_config=given.scaling, run_config=given.run
    ).fit()
