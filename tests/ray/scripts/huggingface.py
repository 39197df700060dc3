"""A Hugging Face Trainer with Ray's callback, which reports what the Trainer has saved."""

import os
import tempfile

import ray.train
import task
import torch
from ray.train.huggingface.transformers import RayTrainReportCallback, prepare_trainer
from ray.train.torch import TorchTrainer
from transformers import Trainer, TrainerCallback, TrainingArguments


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = task.new_model()

    def forward(self, inputs, labels):
        found = self.net(inputs)
        return {"loss": torch.nn.functional.mse_loss(found, labels), "logits": found}


class Diary(TrainerCallback):
    def __init__(self, config):
        self.config = config

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        task.say(self.config, "start", updates=state.global_step, digest=task.digest(model))

    def on_step_end(self, args, state, control, model=None, **kwargs):
        task.compute(self.config)
        task.say(self.config, "step", updates=state.global_step, digest=task.digest(model))

    def on_train_end(self, args, state, control, model=None, **kwargs):
        task.say(self.config, "end", digest=task.digest(model))


def train_loop(config):
    data = [
        {"inputs": inputs[0], "labels": labels[0]}
        for inputs, labels in (task.batch(number) for number in range(64))
    ]
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=config["steps"],
        per_device_train_batch_size=4,
        save_strategy="steps",
        save_steps=1000,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=Model(), args=arguments, train_dataset=data, callbacks=[RayTrainReportCallback(), Diary(config)]
    )
    trainer = prepare_trainer(trainer)
    checkpoint = None if config["forgetful"] else ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            trainer.train(resume_from_checkpoint=os.path.join(folder, "checkpoint"))
    else:
        trainer.train()


if __name__ == "__main__":
    given = task.arguments(steps=120, forgetful=0)
    TorchTrainer(
        train_loop, train_loop_config=given.config, scaling_config=given.scaling, run_config=given.run
    ).fit()
