"""What a project's CustomResourceDefinition says of a field and its published model does not: keys of lists,
defaults, limits.

Taken from the markers in the projects' Go types of 2026: Trainer 2.3 (with its pull requests 3324, on the
grace, and 3689, on the length of words), JobSet and Kubernetes as that uses them. Rules in CEL are left out,
which a Kubernetes of 1.20 has not: that `spec.trainer` of a TrainJob never changes, for one.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

EITHER: Schema = {"x-kubernetes-int-or-string": True}
_DIGITS = r"([0-9]+(\.[0-9]*)?|\.[0-9]+)"
QUANTITY: Schema = {**EITHER, "pattern": rf"^[+-]?{_DIGITS}([KMGTPE]i|[numkMGTPE]|[eE][+-]?{_DIGITS})?$"}
LONG = {  # fields of 64 bits; all others have 32
    "activeDeadlineSeconds",
    "terminationGracePeriodSeconds",
    "runAsUser",
    "runAsGroup",
    "fsGroup",
    "supplementalGroups",
    "tolerationSeconds",
    "expirationSeconds",
    "observedGeneration",
    "seconds",
}


def by(*keys: str, **rules: Any) -> Schema:
    """A list that is a map by these fields of its items: two with the same are refused."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys), **rules}


def one_of(*values: str, **rules: Any) -> Schema:
    return {"enum": list(values), **rules}


_SET: Schema = {"x-kubernetes-list-type": "set"}
_WHOLE: Schema = {"x-kubernetes-map-type": "atomic"}  # as an owner of fields, one has all of it or nothing
_NAME: Schema = {"default": ""}
_TCP: Schema = {"default": "TCP"}
_NOT_NEGATIVE: Schema = {"minimum": 0}
_SHORT: Schema = {"minLength": 1, "maxLength": 253}
_ENV = by("name", maxItems=128)
_WORDS: Schema = {"maxItems": 128, "items": {"maxLength": 4194304}}
_JOBS: Schema = dict.fromkeys(("ready", "succeeded", "failed", "active", "suspended"), _NOT_NEGATIVE)
_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_CONDITION: Schema = {
    "type": {
        "maxLength": 316,
        "pattern": rf"^({_LABEL}(\.{_LABEL})*/)?([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]$",
    },
    "status": one_of("True", "False", "Unknown"),
    "reason": {"minLength": 1, "maxLength": 1024, "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
    "message": {"maxLength": 32768},
    "observedGeneration": _NOT_NEGATIVE,
}

_CORE: dict[str, Schema] = {
    "PodSpec": {
        **{
            name: by("name")
            for name in ("containers", "initContainers", "ephemeralContainers", "volumes", "imagePullSecrets")
        },
        "hostAliases": by("ip"),
        "resourceClaims": by("name"),
        "schedulingGates": by("name"),
        "topologySpreadConstraints": by("topologyKey", "whenUnsatisfiable"),
    },
    **{
        name: {
            "env": by("name"),
            "ports": by("containerPort", "protocol"),
            "volumeMounts": by("mountPath"),
            "volumeDevices": by("devicePath"),
        }
        for name in ("Container", "EphemeralContainer")
    },
    "ContainerPort": {"protocol": _TCP},
    "ResourceRequirements": {"claims": by("name")},
    "GRPCAction": {"service": _NAME},
    "FileKeySelector": {"optional": {"default": False}, **_WHOLE},
    **{
        name: {"name": _NAME, **_WHOLE}
        for name in (
            "LocalObjectReference",
            "ConfigMapKeySelector",
            "SecretKeySelector",
            "ConfigMapEnvSource",
            "SecretEnvSource",
            "ConfigMapProjection",
            "SecretProjection",
            "ConfigMapVolumeSource",
        )
    },
    "ObjectFieldSelector": _WHOLE,
    "ResourceFieldSelector": _WHOLE,
    "NodeSelector": _WHOLE,
    "NodeSelectorTerm": _WHOLE,
    "TypedLocalObjectReference": _WHOLE,
    "AzureDiskVolumeSource": {
        "cachingMode": {"default": "ReadWrite"},
        "fsType": {"default": "ext4"},
        "kind": {"default": "Shared"},
        "readOnly": {"default": False},
    },
    "ISCSIVolumeSource": {"iscsiInterface": {"default": "default"}},
    "RBDVolumeSource": {
        "keyring": {"default": "/etc/ceph/keyring"},
        "pool": {"default": "rbd"},
        "user": {"default": "admin"},
    },
    "ScaleIOVolumeSource": {"fsType": {"default": "xfs"}, "storageMode": {"default": "ThinProvisioned"}},
}

_JOB: dict[str, Schema] = {"PodFailurePolicyOnExitCodesRequirement": {"values": _SET}}

_META: dict[str, Schema] = {"LabelSelector": _WHOLE, "Condition": _CONDITION}

_TRAINER: dict[str, Schema] = {
    "TrainJobSpec": {
        "runtimePatches": by("manager", maxItems=16),
        "suspend": {"default": False},
        "activeDeadlineSeconds": {"minimum": 1},
        "managedBy": {"default": "trainer.kubeflow.org/trainjob-controller", "maxLength": 253},
    },
    "RuntimeRef": {
        "name": _SHORT,
        "apiGroup": {"default": "trainer.kubeflow.org", "maxLength": 253},
        "kind": {"default": "ClusterTrainingRuntime", "maxLength": 253},
    },
    "DatasetInitializer": {"env": _ENV, "storageUri": {"maxLength": 2048}},
    "ModelInitializer": {"env": _ENV, "storageUri": {"maxLength": 2048}},
    "Trainer": {"image": {"maxLength": 500}, "command": _WORDS, "args": _WORDS, "env": _ENV},
    "RuntimePatch": {"manager": _SHORT},
    "JobSetSpecPatch": {"replicatedJobs": by("name", maxItems=100)},
    "ReplicatedJobPatch": {"name": _SHORT},
    "PodSpecPatch": {
        "serviceAccountName": {"maxLength": 253},
        "volumes": by("name", maxItems=128),
        "initContainers": by("name", maxItems=64),
        "containers": by("name", maxItems=64),
        "imagePullSecrets": by("name", maxItems=64),
        "tolerations": {"maxItems": 128},
        "schedulingGates": by("name", maxItems=16),
        "terminationGracePeriodSeconds": _NOT_NEGATIVE,
    },
    "ContainerPatch": {"name": _SHORT, "env": _ENV, "volumeMounts": by("name", maxItems=128)},
    "TrainJobStatus": {
        "conditions": by("type", maxItems=8),
        "jobsStatus": by("name", maxItems=100),
        "minProperties": 1,
    },
    "JobStatus": {"name": _SHORT, **_JOBS},
    "TrainerStatus": {
        "progressPercentage": {"minimum": 0, "maximum": 100},
        "estimatedRemainingSeconds": _NOT_NEGATIVE,
        "metrics": {"maxItems": 256},
    },
    "Metric": {name: {"minLength": 1, "maxLength": 64} for name in ("name", "value")},
    "TrainingRuntimeSpec": {"minProperties": 1},
    "JobSetTemplateSpec": {"minProperties": 1},
    "CoschedulingPodGroupPolicySource": {"scheduleTimeoutSeconds": {"default": 60}},
    "MPIMLPolicySource": {
        "numProcPerNode": {"default": 1},
        "mpiImplementation": one_of("OpenMPI", "", default="OpenMPI"),
        "sshAuthMountPath": {"default": "/root/.ssh"},
        "runLauncherAsNode": {"default": False},
    },
    "EnvInjection": {"targets": by("jobName")},
    "EnvInjectionTarget": {"jobName": {"minLength": 1}, "containerNames": {**_SET, "minItems": 1}},
}

_JOBSET: dict[str, Schema] = {
    "JobSetSpec": {
        "replicatedJobs": by("name"),
        "ttlSecondsAfterFinished": _NOT_NEGATIVE,
        "volumeClaimPolicies": {"maxItems": 50},
    },
    "ReplicatedJob": {
        "groupName": {"default": "default"},
        "replicas": {"default": 1},
        "dependsOn": by("name", maxItems=5),
    },
    "DependsOn": {"status": one_of("Ready", "Complete")},
    "FailurePolicy": {
        "restartStrategy": one_of("Recreate", "BlockingRecreate", "InPlaceRestart", default="Recreate")
    },
    "FailurePolicyRule": {
        "action": one_of(
            "FailJobSet",
            "RestartJobSet",
            "RestartJobSetAndIgnoreMaxRestarts",
            "RestartJob",
            "RestartJobAndIgnoreMaxRestarts",
        ),
    },
    "SuccessPolicy": {"operator": one_of("All", "Any")},
    "StartupPolicy": {"startupPolicyOrder": one_of("AnyOrder", "InOrder")},
    "VolumeClaimPolicy": {"templates": {"maxItems": 50}},
    "VolumeRetentionPolicy": {"whenDeleted": one_of("Delete", "Retain", default="Delete")},
    "JobSetStatus": {
        "conditions": by("type"),
        "replicatedJobsStatus": by("name"),
        "previousInPlaceRestartAttempt": _NOT_NEGATIVE,
        "currentInPlaceRestartAttempt": _NOT_NEGATIVE,
    },
    "ReplicatedJobStatus": {
        name: {"maxItems": 1024} for name in ("jobRestarts", "jobRestartsCountTowardsMax")
    },
}

_CLIENT: dict[str, Schema] = {  # of the Python client of Kubernetes
    "V1ServiceSpec": {"ports": by("port", "protocol")},
    "V1ServicePort": {"protocol": _TCP},
    "V1ServiceStatus": {"conditions": by("type")},
    "V1Condition": _CONDITION,
    "V1LabelSelector": _WHOLE,
    "V2MetricTarget": {"averageValue": QUANTITY, "value": QUANTITY},  # texts, to the client
}

BY_PREFIX: dict[str, dict[str, Schema]] = {
    "IoK8sApiCoreV1": _CORE,
    "IoK8sApiBatchV1": _JOB,
    "IoK8sApimachineryPkgApisMetaV1": _META,
    "TrainerV1alpha1": _TRAINER,
    "JobsetV1alpha2": _JOBSET,
    "": _CLIENT,
}


def of_model(name: str) -> Schema:
    """By field; and what begins with `x-`, or is `minProperties`, is said of the whole."""
    for prefix, rules in BY_PREFIX.items():
        if name.startswith(prefix) and name.removeprefix(prefix) in rules:
            return rules[name.removeprefix(prefix)]
    return {}
