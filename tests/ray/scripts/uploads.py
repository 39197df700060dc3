"""Where checkpoints go, and how: asynchronous uploads, a bucket instead of a folder, only the newest one
kept."""

import os
import tempfile

import pyarrow.fs
import task
import torch
from ray import train
from ray.train import Checkpoint, CheckpointUploadMode
from ray.train.torch import TorchTrainer, prepare_model


def train_fn(config):
    model = prepare_model(task.new_model())
    opt = task.new_optimizer(model)
    rank = train.get_context().get_world_rank()
    done = 0
    ckpt = train.get_checkpoint()
    if ckpt:
        with ckpt.as_directory() as d:
            payload = torch.load(os.path.join(d, "ckpt.pt"))
            model.module.load_state_dict(payload["model"])
            opt.load_state_dict(payload["opt"])
            done = payload["step"]
    task.say(config, "start", updates=task.updates(opt), digest=task.digest(model, opt), step=done)
    mode = CheckpointUploadMode.ASYNC if config["upload"] == "async" else CheckpointUploadMode.SYNC

    for step in range(done + 1, config["steps"] + 1):
        task.compute(config)
        x, y = task.batch(step - 1, rank)
        loss = torch.nn.functional.mse_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        task.say(config, "step", updates=task.updates(opt), digest=task.digest(model, opt))
        if step % 50 == 0:
            checkpoint = None
            if rank == 0:
                folder = tempfile.mkdtemp()
                torch.save(
                    {"model": model.module.state_dict(), "opt": opt.state_dict(), "step": step},
                    f"{folder}/ckpt.pt",
                )
                checkpoint = Checkpoint.from_directory(folder)
            train.report(
                {"step": step},
                checkpoint=checkpoint,
                checkpoint_upload_mode=mode,
                delete_local_checkpoint_after_upload=True,
            )
    task.say(config, "end", digest=task.digest(model, opt))


if __name__ == "__main__":
    given = task.arguments(steps=120, upload="sync", bucket="no")
    if given.bucket == "yes":
        os.makedirs(f"{given.storage}/bucket")
        given.run = train.RunConfig(
            name=given.name,
            storage_path="bucket/runs",
            storage_filesystem=pyarrow.fs.SubTreeFileSystem(given.storage, pyarrow.fs.LocalFileSystem()),
        )
    TorchTrainer(
        train_fn, train_loop_config=given.config, scaling_config=given.scaling, run_config=given.run
    ).fit()
