"""As Ray's own guide has it: `should_checkpoint` in a variable, computed before anything else."""

import os
import tempfile

import ray.train
import ray.train.torch
import task
import torch
import torch.nn as nn
from ray.train import Checkpoint, RunConfig, ScalingConfig  # noqa: F401  (people leave imports behind)


def train_func(config):
    model = ray.train.torch.prepare_model(task.new_model())
    optimizer = task.new_optimizer(model)
    criterion = nn.MSELoss()
    start_epoch = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as checkpoint_dir:
            model_state_dict = torch.load(os.path.join(checkpoint_dir, "model.pt"))
            model.module.load_state_dict(model_state_dict)
            optimizer.load_state_dict(torch.load(os.path.join(checkpoint_dir, "optimizer.pt")))
            start_epoch = torch.load(os.path.join(checkpoint_dir, "extra_state.pt"))["epoch"] + 1
    task.say(
        config,
        "start",
        updates=task.updates(optimizer),
        digest=task.digest(model, optimizer),
        epoch=start_epoch,
    )

    for epoch in range(start_epoch, config["epochs"]):
        for x, y in task.batches(epoch, config, ray.train.get_context().get_world_rank()):
            pred = model(x)
            loss = criterion(pred, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            task.say(config, "step", updates=task.updates(optimizer), digest=task.digest(model, optimizer))

        metrics = {"loss": loss.item()}
        with tempfile.TemporaryDirectory() as temp_checkpoint_dir:
            checkpoint = None

            should_checkpoint = epoch % config.get("checkpoint_freq", 10) == 0
            # In standard DDP training, where the model is the same across all ranks,
            # only the global rank 0 worker needs to save and report the checkpoint.
            if ray.train.get_context().get_world_rank() == 0 and should_checkpoint:
                torch.save(model.module.state_dict(), os.path.join(temp_checkpoint_dir, "model.pt"))
                torch.save(optimizer.state_dict(), os.path.join(temp_checkpoint_dir, "optimizer.pt"))
                torch.save({"epoch": epoch}, os.path.join(temp_checkpoint_dir, "extra_state.pt"))
                checkpoint = Checkpoint.from_directory(temp_checkpoint_dir)

            ray.train.report(metrics, checkpoint=checkpoint)

    if ray.train.get_context().get_world_rank() == 0:
        print(metrics)
    task.say(config, "end", digest=task.digest(model, optimizer))


if __name__ == "__main__":
    given = task.arguments(epochs=30, batches=4)
    trainer = ray.train.torch.TorchTrainer(
        train_loop_per_worker=train_func,
        train_loop_config=given.config,
        scaling_config=given.scaling,
        run_config=given.run,
    )
    result = trainer.fit()
    print(result.checkpoint)
