"""The configuration in code that the announcement has under "before", around the loop of seed.py."""

import task
from ray.train import RunConfig
from ray.train._internal.jit_checkpoint_config import JITCheckpointConfig
from ray.train.torch import TorchTrainer
from seed import train_func

if __name__ == "__main__":
    given = task.arguments(epochs=40)
    trainer = TorchTrainer(
        train_func,
        train_loop_config=given.config,
        scaling_config=given.scaling,
        run_config=RunConfig(
            name=given.name,
            storage_path=given.storage,
            jit_checkpoint_config=JITCheckpointConfig(
                enabled=True,
                kill_wait=3.0,
            ),
        ),
    )
    trainer.fit()
