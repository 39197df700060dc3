"""The loop of steps.py with Ray's own get_preemption_info() in it, as its documentation has it: saves once,
and trains on."""

import os
import tempfile

import task
import torch
from ray.train import Checkpoint, get_checkpoint, get_context, get_preemption_info, report
from ray.train.torch import TorchTrainer, prepare_model


def train_fn(config):
    model = prepare_model(task.new_model())
    opt = task.new_optimizer(model)
    rank = get_context().get_world_rank()
    step = 0
    ckpt = get_checkpoint()
    if ckpt:
        with ckpt.as_directory() as d:
            payload = torch.load(os.path.join(d, "ckpt.pt"))
            model.module.load_state_dict(payload["model"])
            opt.load_state_dict(payload["opt"])
            step = payload["step"]
    task.say(config, "start", updates=task.updates(opt), digest=task.digest(model, opt), step=step)

    saved_on_preemption = False
    while step < config["steps"]:
        task.compute(config)
        x, y = task.batch(step, rank)
        loss = torch.nn.functional.mse_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
        task.say(config, "step", updates=task.updates(opt), digest=task.digest(model, opt))

        preempted = get_preemption_info() is not None and not saved_on_preemption
        if step % config["save_every"] == 0 or step == config["steps"] or preempted:
            saved_on_preemption = saved_on_preemption or preempted
            with tempfile.TemporaryDirectory() as tmp:
                checkpoint = None
                if rank == 0:
                    torch.save(
                        {"model": model.module.state_dict(), "opt": opt.state_dict(), "step": step},
                        os.path.join(tmp, "ckpt.pt"),
                    )
                    checkpoint = Checkpoint.from_directory(tmp)
                report({"loss": loss.item(), "step": step}, checkpoint=checkpoint)
        elif step % 10 == 0:
            report({"loss": loss.item(), "step": step})
    task.say(config, "end", digest=task.digest(model, opt))


if __name__ == "__main__":
    given = task.arguments(steps=120, save_every=100)
    TorchTrainer(
        train_fn, train_loop_config=given.config, scaling_config=given.scaling, run_config=given.run
    ).fit()
