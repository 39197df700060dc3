"""The public names for Kubeflow Trainer.

TrainerClient().train(trainer=lastcall.kubeflow.TransformersTrainer(func=train,
output_dir="pvc://shared/checkpoints"))
"""

from __future__ import annotations

from lastcall import installing

try:
    import kubeflow.trainer  # noqa: F401
except ImportError as error:
    raise ImportError(
        installing.missing("lastcall.kubeflow", f"Kubeflow's SDK ({error})", "kubeflow")
    ) from error

from lastcall.adapters.kubeflow import patch
from lastcall.adapters.kubeflow.trainer import TransformersTrainer
from lastcall.settings import PeriodicCheckpointConfig

__all__ = ["PeriodicCheckpointConfig", "TransformersTrainer"]

patch.apply()
