"""A class that holds everything: self.epoch, self.step, methods that train, save and load."""

import os
import tempfile

import ray.train
import task
import torch
from ray.train.torch import TorchTrainer, prepare_model


class Learner:
    def __init__(self, config):
        self.config = config
        self.rank = ray.train.get_context().get_world_rank()
        self.model = prepare_model(task.new_model())
        self.optimizer = task.new_optimizer(self.model)
        self.epoch = 0
        self.step = 0
        self.load()

    def load(self):
        checkpoint = ray.train.get_checkpoint()
        if checkpoint is not None:
            with checkpoint.as_directory() as directory:
                state = torch.load(os.path.join(directory, "learner.pt"), map_location="cpu")
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.epoch = state["epoch"] + 1
            self.step = state["step"]
        updates, digest = task.updates(self.optimizer), task.digest(self.model, self.optimizer)
        task.say(self.config, "start", updates=updates, digest=digest, epoch=self.epoch, step=self.step)

    def state_dict(self):
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "epoch": self.epoch,
            "step": self.step,
        }

    def save(self, metrics):
        with tempfile.TemporaryDirectory() as directory:
            checkpoint = None
            if self.rank == 0:
                torch.save(self.state_dict(), os.path.join(directory, "learner.pt"))
                checkpoint = ray.train.Checkpoint.from_directory(directory)
            ray.train.report(metrics, checkpoint=checkpoint)

    def train_batch(self, inputs, targets):
        self.optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(self.model(inputs), targets)
        loss.backward()
        self.optimizer.step()
        self.step += 1
        task.say(
            self.config,
            "step",
            updates=task.updates(self.optimizer),
            digest=task.digest(self.model, self.optimizer),
        )
        return loss.item()

    def train_epoch(self):
        losses = [self.train_batch(*batch) for batch in task.batches(self.epoch, self.config, self.rank)]
        return {"loss": sum(losses) / len(losses), "epoch": self.epoch, "step": self.step}

    def should_save(self):
        return (self.epoch + 1) % self.config["every"] == 0

    def run(self):
        while self.epoch < self.config["epochs"]:
            metrics = self.train_epoch()
            if self.should_save():
                self.save(metrics)
            else:
                ray.train.report(metrics)
            self.epoch += 1
        task.say(self.config, "end", digest=task.digest(self.model, self.optimizer))


def main(config):
    Learner(config).run()


if __name__ == "__main__":
    given = task.arguments(epochs=30, batches=4, every=10)
    TorchTrainer(
        main, train_loop_config=given.config, scaling_config=given.scaling, run_config=given.run
    ).fit()
