"""A trial of Ray Tune that trains with Ray Train: it is a driver of its own, with the environment of its
node."""

import ray.tune
import task
from ray.train import RunConfig
from ray.train.torch import TorchTrainer
from seed import train_func

if __name__ == "__main__":
    given = task.arguments(epochs=30)

    def trial(config):
        run_config = RunConfig(name=given.name, storage_path=given.storage)
        TorchTrainer(
            train_func, train_loop_config=given.config, scaling_config=given.scaling, run_config=run_config
        ).fit()

    found = ray.tune.Tuner(
        trial, run_config=ray.tune.RunConfig(name="tune", storage_path=f"{given.storage}-tune")
    ).fit()
    assert not found.errors, found.errors
