"""`TrainerClient.train(trainer=TransformersTrainer(...))` works: it is translated for the backends' train()
into the SDK's own terms.

Discarded: a client of our own, since notebooks have one already; an option that the user must pass, since it
would be forgotten, and the run would silently be unprotected.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from kubeflow.trainer.backends.container.backend import ContainerBackend
from kubeflow.trainer.backends.kubernetes.backend import KubernetesBackend
from kubeflow.trainer.backends.localprocess.backend import LocalProcessBackend

from lastcall.adapters.kubeflow import locations, submission
from lastcall.adapters.kubeflow.trainer import TransformersTrainer
from lastcall.core.process import patching


def apply() -> None:
    """Once in a process. Every other trainer goes through as before."""
    for backend in (KubernetesBackend, LocalProcessBackend, ContainerBackend):
        patching.wrap(backend, "train", functools.partial(_train, backend))


def _train(kind: type, original: Any) -> Any:
    signature = inspect.signature(original)

    def train(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        trainer = call.arguments.get("trainer")
        if isinstance(trainer, TransformersTrainer):
            place = locations.parse(trainer.output_dir) if trainer.output_dir is not None else None
            options = list(call.arguments.get("options") or ())
            mirror, cluster = place.mirror if place else None, kind is KubernetesBackend
            call.arguments["trainer"] = submission.custom(
                trainer, _directory(place, kind), mirror, mounted=cluster
            )
            if cluster:
                call.arguments["options"] = [*options, submission.Additions(trainer, place)]
        return original(*call.args, **call.kwargs)

    return train


def _directory(place: locations.Location | None, kind: type) -> str | None:
    if place is None:
        return None
    if kind is KubernetesBackend:
        return place.in_pod()
    if kind is LocalProcessBackend:
        return place.here()
    if place.mirror is not None:
        return place.in_pod()
    if place.claim is not None:
        raise ValueError(
            f"output_dir='pvc://{place.claim}/{place.path}': there are no claims without a "
            "cluster. Use a path"
        )
    return place.path
