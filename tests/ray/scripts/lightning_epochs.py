"""Lightning as Ray's documentation has it: RayTrainReportCallback reports a checkpoint at the end of each
epoch."""

import os

import lightning.pytorch as pl
import task
import torch
from ray import train
from ray.train.lightning import (
    RayDDPStrategy,
    RayLightningEnvironment,
    RayTrainReportCallback,
    prepare_trainer,
)
from ray.train.torch import TorchTrainer


class Net(pl.LightningModule):
    def __init__(self, config):
        super().__init__()
        self.net = task.new_model()
        self.config = config

    def training_step(self, batch, index):
        task.compute(self.config)
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return task.new_optimizer(self.net)

    def on_train_start(self):
        task.say(self.config, "start", updates=self.trainer.global_step, digest=task.digest(self.net))

    def on_train_batch_end(self, outputs, batch, index):
        task.say(self.config, "step", updates=self.trainer.global_step, digest=task.digest(self.net))

    def on_train_end(self):
        task.say(self.config, "end", digest=task.digest(self.net))


def train_func(config):
    found = [task.batch(number) for number in range(config["batches"] * 2)]
    data = torch.utils.data.TensorDataset(*(torch.cat(parts) for parts in zip(*found, strict=True)))
    trainer = pl.Trainer(
        max_epochs=config["epochs"],
        devices="auto",
        accelerator="cpu",
        strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment()],
        callbacks=[RayTrainReportCallback()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        logger=False,
    )
    trainer = prepare_trainer(trainer)
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    checkpoint = train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            trainer.fit(
                Net(config), train_dataloaders=loader, ckpt_path=os.path.join(folder, "checkpoint.ckpt")
            )
    else:
        trainer.fit(Net(config), train_dataloaders=loader)


if __name__ == "__main__":
    given = task.arguments(epochs=8, batches=6)
    TorchTrainer(
        train_func, train_loop_config=given.config, scaling_config=given.scaling, run_config=given.run
    ).fit()
