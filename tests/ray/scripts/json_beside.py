"""Tensors in one file, everything else in a JSON file beside it, a history that grows; the branch is nested
in that of rank 0."""

import json
import pathlib
import shutil
import tempfile

import task
import torch
from ray import train
from ray.train.torch import TorchTrainer, prepare_model


def write(folder, model, optimizer, meta):
    torch.save(model.state_dict(), folder / "weights.pt")
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    (folder / "meta.json").write_text(json.dumps(meta, indent=2))


def train_func(config):
    world_rank = train.get_context().get_world_rank()
    model = prepare_model(task.new_model())
    optimizer = task.new_optimizer(model)
    meta = {"epoch": 0, "history": []}
    checkpoint = train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            folder = pathlib.Path(folder)
            model.load_state_dict(torch.load(folder / "weights.pt"))
            optimizer.load_state_dict(torch.load(folder / "optimizer.pt"))
            meta = json.loads((folder / "meta.json").read_text())
    updates, digest = task.updates(optimizer), task.digest(model, optimizer)
    task.say(
        config, "start", updates=updates, digest=digest, epoch=meta["epoch"], history=len(meta["history"])
    )

    for epoch in range(meta["epoch"], config["epochs"]):
        model.train()
        for inputs, targets in task.batches(epoch, config, world_rank):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            optimizer.step()
            task.say(config, "step", updates=task.updates(optimizer), digest=task.digest(model, optimizer))
        meta["history"].append(loss.item())
        meta["epoch"] = epoch + 1
        checkpoint = None
        folder = None
        if world_rank == 0:  # noqa: SIM102
            if (epoch + 1) % config["every"] == 0:
                folder = pathlib.Path(tempfile.mkdtemp())
                write(folder, model, optimizer, meta)
                checkpoint = train.Checkpoint.from_directory(folder)
        train.report({"loss": loss.item()}, checkpoint=checkpoint)
        if folder is not None:
            shutil.rmtree(folder)
    task.say(config, "end", digest=task.digest(model, optimizer))


if __name__ == "__main__":
    given = task.arguments(epochs=30, batches=4, every=10)
    TorchTrainer(
        train_func, train_loop_config=given.config, scaling_config=given.scaling, run_config=given.run
    ).fit()
