"""The dictionary is made at every epoch, the branch only writes it; reports without a checkpoint come from
everywhere else."""

import tempfile
from pathlib import Path

import task
import torch
from ray import train
from ray.train.torch import TorchTrainer, prepare_model


def fit(config):
    model = prepare_model(task.new_model())
    optimizer = task.new_optimizer(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    rank = train.get_context().get_world_rank()
    first, best = 0, float("inf")
    if (resumed := train.get_checkpoint()) is not None:
        with resumed.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt", weights_only=False)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        first, best = state["next_epoch"], state["best"]
    task.say(
        config, "start", updates=task.updates(optimizer), digest=task.digest(model, optimizer), epoch=first
    )

    for epoch in range(first, config["epochs"]):
        losses = []
        for inputs, targets in task.batches(epoch, config, rank):
            loss = ((model(inputs) - targets) ** 2).mean()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            task.say(config, "step", updates=task.updates(optimizer), digest=task.digest(model, optimizer))
        scheduler.step()
        mean = sum(losses) / len(losses)
        best = min(best, mean)
        state = {
            "model": model.module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "next_epoch": epoch + 1,
            "best": best,
        }
        metrics = {"loss": mean, "lr": scheduler.get_last_lr()[0]}
        if epoch % config["every"] == config["every"] - 1:
            with tempfile.TemporaryDirectory() as folder:
                if rank == 0:
                    torch.save(state, Path(folder) / "state.pt")
                    train.report(metrics, checkpoint=train.Checkpoint.from_directory(folder))
                else:
                    train.report(metrics)
        else:
            train.report(metrics)
    task.say(config, "end", digest=task.digest(model, optimizer))


if __name__ == "__main__":
    given = task.arguments(epochs=30, batches=4, every=10)
    TorchTrainer(
        fit, train_loop_config=given.config, scaling_config=given.scaling, run_config=given.run
    ).fit()
