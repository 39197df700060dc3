"""The TrainJob of the second seed: how it is submitted through the real SDK, what must come of it field by
field, and the pods that Kubeflow's controller makes of it. The API server behind it may be a real one or
`api`'s."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kubeflow.trainer import KubernetesBackendConfig, TrainerClient

from helpers.kubeflow import functions as kubeflow_functions
from lastcall.kubeflow import PeriodicCheckpointConfig, TransformersTrainer

Object = dict[str, Any]

# Kubeflow's own: manifests/base/runtimes/torch_distributed.yaml
RUNTIME: Object = {
    "apiVersion": "trainer.kubeflow.org/v1alpha1",
    "kind": "ClusterTrainingRuntime",
    "metadata": {"name": "torch-distributed", "labels": {"trainer.kubeflow.org/framework": "torch"}},
    "spec": {
        "mlPolicy": {"numNodes": 1, "torch": {}},
        "template": {
            "spec": {
                "replicatedJobs": [
                    {
                        "name": "node",
                        "template": {
                            "metadata": {
                                "labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
                            },
                            "spec": {
                                "template": {
                                    "spec": {
                                        "containers": [
                                            {
                                                "name": "node",
                                                "image": "pytorch/pytorch:2.9.1-cuda12.8-cudnn9-runtime",
                                            }
                                        ]
                                    }
                                }
                            },
                        },
                    }
                ]
            }
        },
    },
}
SERVERS_OWN = (
    "uid",
    "creationTimestamp",
    "generation",
    "managedFields",
    "resourceVersion",
    "selfLink",
    "namespace",
)


def of_the_seed(**changes: Any) -> TransformersTrainer:
    """As the second seed writes it, around a function that a shell would not leave as it is."""
    said = {
        "func": kubeflow_functions.peculiar,
        "func_args": {"path": "said.json", "words": ["a b", "${x}", "ü"]},
        "num_nodes": 2,
        "resources_per_node": {"nvidia.com/gpu": 1, "cpu": "4", "memory": "16Gi"},
        "enable_jit_checkpoint": True,
        "output_dir": "pvc://shared/checkpoints/jit-checkpointing",
        "periodic_checkpoint_config": PeriodicCheckpointConfig(
            save_strategy="steps", save_steps=20, save_total_limit=2
        ),
        "env": {"HF_HUB_OFFLINE": "1"},
    }
    return TransformersTrainer(**{**said, **changes})


def submit(
    kubeconfig: Path, trainer: Any, namespace: str = "default", options: list[Any] | None = None
) -> str:
    """Through the SDK, as a notebook does. The runtime must be there. Returns the TrainJob's name."""
    client = TrainerClient(KubernetesBackendConfig(namespace=namespace, config_file=str(kubeconfig)))
    name: str = client.train(runtime="torch-distributed", trainer=trainer, options=options)
    return name


def expected(name: str, command: list[str]) -> Object:
    """The TrainJob of `of_the_seed()`. The command is looked at elsewhere: it is run."""
    variables = {
        "LASTCALL_ENABLED": "1",
        "LASTCALL_GRACE_SECONDS": "120",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "120",
        "LASTCALL_DIRECTORY": "/mnt/kubeflow-checkpoints/checkpoints/jit-checkpointing",
        "LASTCALL_PROGRESS_PORT": "28080",
        "LASTCALL_SAVE_STRATEGY": "steps",
        "LASTCALL_SAVE_STEPS": "20",
        "LASTCALL_SAVE_TOTAL_LIMIT": "2",
        "HF_HUB_OFFLINE": "1",
    }
    resources = {"nvidia.com/gpu": 1, "cpu": "4", "memory": "16Gi"}
    pod = {
        "terminationGracePeriodSeconds": 120,
        "volumes": [{"name": "checkpoint-storage", "persistentVolumeClaim": {"claimName": "shared"}}],
        "containers": [
            {
                "name": "node",
                "volumeMounts": [{"name": "checkpoint-storage", "mountPath": "/mnt/kubeflow-checkpoints"}],
            }
        ],
    }
    job = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {
            "name": name,
            "annotations": {
                "trainer.opendatahub.io/progression-tracking": "true",
                "trainer.opendatahub.io/metrics-port": "28080",
                "trainer.opendatahub.io/metrics-poll-interval": "30",
            },
        },
        "spec": {
            "runtimeRef": {"name": "torch-distributed", "kind": "ClusterTrainingRuntime"},
            "trainer": {
                "numNodes": 2,
                "resourcesPerNode": {"requests": resources, "limits": resources},
                "command": command,
                "env": [{"name": name, "value": value} for name, value in variables.items()],
            },
            "runtimePatches": [
                {
                    "manager": "lastcall.dev/kubeflow",
                    "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}},
                }
            ],
        },
    }


def differences(found: Any, wanted: Any, path: str = "") -> Iterator[str]:
    """Where two objects differ, in words. What only a server adds to `metadata`, and `status`, is no
    difference."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        added = SERVERS_OWN if path == ".metadata" else ("status",) if path == "" else ()
        for name in {**wanted, **found}:
            if name not in added or name in wanted:
                yield from differences(found.get(name), wanted.get(name), f"{path}.{name}")
    elif isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
            yield from differences(one, other, f"{path}[{number}]")
    elif found != wanted:
        yield f"{path}: {found!r} instead of {wanted!r}"


def pod_template(job: Object, runtime: Object = RUNTIME) -> Object:
    """The pods of a TrainJob, as far as it says anything of them: the runtime's, with the trainer's words and
    the patches in them."""
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pod: Object = copy.deepcopy(replicated["template"]["spec"]["template"])
    (container,) = pod["spec"]["containers"]
    trainer = job["spec"]["trainer"]
    container.update({name: trainer[name] for name in ("image", "command", "args") if name in trainer})
    container["env"] = [*container.get("env", ()), *trainer.get("env", ())]
    for patch in job["spec"].get("runtimePatches", ()):
        for patched in patch["trainingRuntimeSpec"]["template"].get("spec", {}).get("replicatedJobs", ()):
            spec = copy.deepcopy(patched["template"]["spec"]["template"]["spec"])
            pod["spec"].update({name: value for name, value in spec.items() if name != "containers"})
            for one in spec.get("containers", ()):
                container.setdefault("volumeMounts", []).extend(one.get("volumeMounts", ()))
    return pod


def expanded(command: list[str], environ: dict[str, str]) -> list[str]:
    """As the kubelet starts it: `$(NAME)` is what NAME is in the container, and `$$` is `$`."""

    def once(text: str) -> str:
        done, rest = "", text
        while "$" in rest:
            before, _, rest = rest.partition("$")
            name, closed, after = rest[1:].partition(")") if rest[:1] == "(" else ("", "", "")
            if rest[:1] == "$":
                done, rest = f"{done}{before}$", rest[1:]
            elif closed:
                done, rest = f"{done}{before}{environ.get(name, f'$({name})')}", after
            else:
                done = f"{done}{before}$"
        return done + rest

    return [once(part) for part in command]
