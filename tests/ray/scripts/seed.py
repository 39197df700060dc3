"""The shape of the seed: no optimizer in the checkpoint, no DDP, a save in the branch and a report without
one in the other."""

import tempfile

import task
import torch
from ray import train
from ray.train import Checkpoint
from ray.train.torch import TorchTrainer


def train_step(model, optimizer, epoch):
    inputs, targets = task.batch(epoch)
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def train_func(config):
    torch.manual_seed(0)
    model = torch.nn.Linear(10, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    # Load from checkpoint if resuming
    checkpoint = train.get_checkpoint()
    start_epoch = 0

    if checkpoint:
        with checkpoint.as_directory() as checkpoint_dir:
            model.load_state_dict(torch.load(f"{checkpoint_dir}/model.pt"))
            start_epoch = torch.load(f"{checkpoint_dir}/epoch.pt") + 1
    task.say(config, "start", updates=start_epoch, digest=task.digest(model))

    # Training loop
    for epoch in range(start_epoch, config["epochs"]):
        task.compute(config)
        loss = train_step(model, optimizer, epoch)
        task.say(config, "step", updates=epoch + 1, digest=task.digest(model))

        # Regular checkpoint every 10 epochs
        if epoch % 10 == 0:
            with tempfile.TemporaryDirectory() as tmpdir:
                torch.save(model.state_dict(), f"{tmpdir}/model.pt")
                torch.save(epoch, f"{tmpdir}/epoch.pt")

                checkpoint = Checkpoint.from_directory(tmpdir)
                train.report({"epoch": epoch, "loss": loss}, checkpoint=checkpoint)
        else:
            train.report({"epoch": epoch, "loss": loss})
    task.say(config, "end", digest=task.digest(model))


if __name__ == "__main__":
    given = task.arguments(epochs=40)
    trainer = TorchTrainer(
        train_func, train_loop_config=given.config, scaling_config=given.scaling, run_config=given.run
    )
    trainer.fit()
