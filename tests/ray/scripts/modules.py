"""Says which modules of lastcall are imported: in the driver, in the controller and in the train worker."""

import json
import pathlib
import sys

import task
from ray import train
from ray.train import UserCallback
from ray.train.torch import TorchTrainer


def imported():
    return sorted(name for name in sys.modules if name.split(".")[0] == "lastcall")


class Look(UserCallback):
    def __init__(self, folder):
        self.folder = folder

    def after_report(self, run_context, metrics, checkpoint):
        pathlib.Path(self.folder, "controller").write_text(json.dumps(imported()))


def train_func(config):
    train.report({"modules": imported()})
    pathlib.Path(config["folder"], "worker").write_text(json.dumps(imported()))


if __name__ == "__main__":
    given = task.arguments()
    pathlib.Path(given.storage).mkdir(parents=True)
    given.run.callbacks = [Look(given.storage)]
    config = {"folder": given.storage}
    TorchTrainer(
        train_func, train_loop_config=config, scaling_config=given.scaling, run_config=given.run
    ).fit()
    seen = {
        name: json.loads(pathlib.Path(given.storage, name).read_text()) for name in ("worker", "controller")
    }
    pathlib.Path(given.storage, "modules.json").write_text(json.dumps({"driver": imported(), **seen}))
