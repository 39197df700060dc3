"""The complete example of Ray's proposed JIT checkpointing, with the train_step that it leaves out, and
without its configuration:

RAY_TRAIN_JIT_CHECKPOINT_ENABLED=1 RAY_TRAIN_JIT_CHECKPOINT_KILL_WAIT=5.0 python examples/ray_vanilla.py

Not a line of it knows of lastcall. While it runs: kill -TERM $(pgrep -f ray::RayTrainWorker | head -1)
"""

import tempfile

import torch
from ray import train
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train_step(model, optimizer):
    inputs = torch.randn(32, 10)
    loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def train_func(config):
    model = torch.nn.Linear(10, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    # Load from checkpoint if resuming
    checkpoint = train.get_checkpoint()
    start_epoch = 0

    if checkpoint:
        with checkpoint.as_directory() as checkpoint_dir:
            model.load_state_dict(torch.load(f"{checkpoint_dir}/model.pt"))
            start_epoch = torch.load(f"{checkpoint_dir}/epoch.pt") + 1

    # Training loop
    for epoch in range(start_epoch, config["num_epochs"]):
        # Training code here...
        loss = train_step(model, optimizer)

        # Regular checkpoint every 10 epochs
        if epoch % 10 == 0:
            with tempfile.TemporaryDirectory() as tmpdir:
                torch.save(model.state_dict(), f"{tmpdir}/model.pt")
                torch.save(epoch, f"{tmpdir}/epoch.pt")

                checkpoint = Checkpoint.from_directory(tmpdir)
                train.report({"epoch": epoch, "loss": loss}, checkpoint=checkpoint)
        else:
            train.report({"epoch": epoch, "loss": loss})


trainer = TorchTrainer(
    train_func,
    train_loop_config={"num_epochs": 100},
    scaling_config=ScalingConfig(num_workers=4),
    run_config=RunConfig(),
)

result = trainer.fit()
