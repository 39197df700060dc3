"""Saves and loads by the recipe of torch.distributed.checkpoint, whose get_state_dict() steps a fresh
optimizer once."""

import os
import tempfile

import ray.train.torch
import task
import torch
import torch.distributed.checkpoint as dcp
from ray import train
from ray.train.torch import TorchTrainer
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful


class AppState(Stateful):
    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state):
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        self.step = state["step"]


def train_func(config):
    model = ray.train.torch.prepare_model(task.new_model())
    optimizer = task.new_optimizer(model)
    rank = train.get_context().get_world_rank()
    app = AppState(model, optimizer)
    checkpoint = train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            dcp.load({"app": app}, checkpoint_id=folder)
    task.say(config, "start", updates=task.updates(optimizer), digest=task.digest(model, optimizer))
    for step in range(app.step, config["steps"]):
        task.compute(config)
        inputs, targets = task.batch(step, rank)
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        app.step = step + 1
        task.say(config, "step", updates=task.updates(optimizer), digest=task.digest(model, optimizer))
        if (step + 1) % config["save_every"] == 0:
            with tempfile.TemporaryDirectory() as folder:
                dcp.save({"app": app}, checkpoint_id=os.path.join(folder))
                train.report({"step": step}, checkpoint=train.Checkpoint.from_directory(folder))
    task.say(config, "end", digest=task.digest(model, optimizer))


if __name__ == "__main__":
    given = task.arguments(steps=60, save_every=1000)
    TorchTrainer(
        train_func, train_loop_config=given.config, scaling_config=given.scaling, run_config=given.run
    ).fit()
