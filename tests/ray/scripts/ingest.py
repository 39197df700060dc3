"""Batches that Ray Data brings, an epoch a pass over the shard, and a save at the end of every tenth."""

import os
import tempfile

import ray.data
import ray.train
import ray.train.torch
import task
import torch
from ray.train import Checkpoint
from ray.train.torch import TorchTrainer


def train_loop(config):
    model = ray.train.torch.prepare_model(task.new_model())
    optimizer = task.new_optimizer(model)
    start_epoch = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            saved = torch.load(os.path.join(folder, "state.pt"))
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start_epoch = saved["epoch"] + 1
    rank = ray.train.get_context().get_world_rank()
    task.say(
        config,
        "start",
        updates=task.updates(optimizer),
        digest=task.digest(model, optimizer),
        epoch=start_epoch,
    )

    shard = ray.train.get_dataset_shard("train")
    for epoch in range(start_epoch, config["epochs"]):
        for rows in shard.iter_batches(batch_size=1):
            task.compute(config)
            inputs, targets = task.batch(epoch * config["batches"] + int(rows["id"][0]), rank)
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            task.say(config, "step", updates=task.updates(optimizer), digest=task.digest(model, optimizer))
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if epoch % 10 == 9 and rank == 0:
                state = {
                    "model": model.module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "epoch": epoch,
                }
                torch.save(state, os.path.join(folder, "state.pt"))
                checkpoint = Checkpoint.from_directory(folder)
            ray.train.report({"loss": loss.item()}, checkpoint=checkpoint)
    task.say(config, "end", digest=task.digest(model, optimizer))


if __name__ == "__main__":
    given = task.arguments(epochs=20, batches=6)
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    TorchTrainer(
        train_loop,
        train_loop_config=given.config,
        scaling_config=given.scaling,
        run_config=given.run,
        datasets={"train": ray.data.range(given.batches, override_num_blocks=1)},
        dataset_config=ray.train.DataConfig(datasets_to_split=[]),  # each rank sees every row
    ).fit()
