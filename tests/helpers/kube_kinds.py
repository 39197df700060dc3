"""The kinds of KubeRay, Kubeflow and JobSet, as CustomResourceDefinitions for a test cluster.

No registry that we reach carries the projects' own files. So they are written here from the projects' public types (KubeRay
ray.io/v1, Trainer v2 trainer.kubeflow.org/v1alpha1, training-operator kubeflow.org/v1, JobSet v1alpha2): the fields of `spec` that a
user sets, with their types, defaults and what is required, structural, and so with all others pruned. Pod and Job templates have the
API server's own schema, expanded, as theirs have; `status` is open, and so is the JobSet in a runtime, which nobody changes here
(each expanded template costs this API server seconds). What is not in them: rules in CEL (this server knows none), and fields of a
pod that are younger than the server.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "format": "int32"}
NUMBER: Schema = {"type": "number"}
EITHER: Schema = {"x-kubernetes-int-or-string": True}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}
ANYTHING: Schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
METADATA: Schema = {
    "type": "object",
    "properties": {
        "name": TEXT,
        "namespace": TEXT,
        "labels": TEXTS,
        "annotations": TEXTS,
        "finalizers": {"type": "array", "items": TEXT},
    },
}


def several(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def keyed(items: Schema, key: str) -> Schema:
    return {**several(items), "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


def struct(*required: str, **fields: Schema) -> Schema:
    return {"type": "object", "properties": fields, **({"required": list(required)} if required else {})}


@dataclass(frozen=True)
class Kind:
    """`name` is its kind; `spec` what a user may say."""

    name: str
    group: str
    version: str
    spec: Schema
    cluster_wide: bool = False
    status: bool = True

    def definition(self) -> Schema:
        plural = f"{self.name.lower()}s"
        fields = {"apiVersion": TEXT, "kind": TEXT, "metadata": {"type": "object"}, "spec": self.spec}
        version = {"name": self.version, "served": True, "storage": True, "subresources": {"status": {}} if self.status else {}}
        version["schema"] = {"openAPIV3Schema": struct(**fields, **({"status": ANYTHING} if self.status else {}))}
        names = {"kind": self.name, "listKind": f"{self.name}List", "plural": plural, "singular": self.name.lower()}
        # Names below *.kubernetes.io and *.k8s.io are protected: they need a word on who has approved them.
        metadata = {"name": f"{plural}.{self.group}", "annotations": {"api-approved.kubernetes.io": "unapproved, for tests"}}
        spec = {"group": self.group, "names": names, "scope": "Cluster" if self.cluster_wide else "Namespaced", "versions": [version]}
        return {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": metadata, "spec": spec}


@dataclass
class Library:
    """The schemas of the server itself, `GET /openapi/v2`, with all references replaced by what they refer to."""

    openapi: Schema
    _known: dict[str, Schema] = field(default_factory=dict)

    def schema(self, name: str) -> Schema:
        if name not in self._known:
            self._known[name] = self._expanded(name, self.openapi["definitions"][name])
        return self._known[name]

    def _expanded(self, name: str, given: Schema) -> Schema:
        if name.endswith((".IntOrString", ".Quantity")):
            return EITHER
        if name.endswith(".ObjectMeta"):
            return METADATA
        if "$ref" in given:
            return self.schema(given["$ref"].removeprefix("#/definitions/"))
        kept = {key: value for key, value in given.items() if key in ("type", "format", "required", *_LISTS)}
        for key in ("items", "additionalProperties"):
            if key in given:
                kept[key] = self._expanded("", given[key])
        if "properties" in given:
            kept["properties"] = {key: self._expanded("", value) for key, value in given["properties"].items()}
        if "protocol" in kept.get(
            "x-kubernetes-list-map-keys", ()
        ):  # a key has to be there; the server's own schema has the default in its code
            protocol = {**TEXT, "default": "TCP"}
            kept["items"] = {**kept["items"], "properties": {**kept["items"]["properties"], "protocol": protocol}}
        return kept


_LISTS = ("x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-map-type")


def all_kinds(library: Library) -> list[Kind]:
    pod = library.schema("io.k8s.api.core.v1.PodTemplateSpec")
    job = library.schema("io.k8s.api.batch.v1beta1.JobTemplateSpec")
    core = {name: library.schema(f"io.k8s.api.core.v1.{name}") for name in _CORE}
    ray = _ray_cluster(pod, core)
    return [
        Kind("RayCluster", "ray.io", "v1", ray),
        Kind("RayJob", "ray.io", "v1", _ray_job(ray, pod)),
        Kind(
            "RayService",
            "ray.io",
            "v1",
            struct(serveConfigV2=TEXT, rayClusterConfig=ray, serveService=ANYTHING, upgradeStrategy=ANYTHING),
        ),
        Kind("JobSet", "jobset.x-k8s.io", "v1alpha2", _jobset(job)),
        Kind("TrainJob", "trainer.kubeflow.org", "v1alpha1", _train_job(core)),
        Kind("TrainingRuntime", "trainer.kubeflow.org", "v1alpha1", _runtime(), status=False),
        Kind("ClusterTrainingRuntime", "trainer.kubeflow.org", "v1alpha1", _runtime(), cluster_wide=True, status=False),
        Kind("PyTorchJob", "kubeflow.org", "v1", _pytorch_job(pod)),
    ]


_CORE = (
    "EnvVar", "EnvFromSource", "VolumeMount", "Volume", "ResourceRequirements", "SecurityContext", "PodSecurityContext", "Affinity",
    "Toleration",
    "LocalObjectReference",
)  # fmt: skip


def _ray_cluster(pod: Schema, core: dict[str, Schema]) -> Schema:
    head = struct(
        "template",
        serviceType=TEXT,
        headService=ANYTHING,
        enableIngress=FLAG,
        rayStartParams=TEXTS,
        resources=TEXTS,
        labels=TEXTS,
        template=pod,
    )
    worker = struct(
        "groupName", "maxReplicas", "minReplicas", "template",
        groupName=TEXT, suspend=FLAG, replicas={**COUNT, "default": 0}, minReplicas={**COUNT, "default": 0},
        maxReplicas={**COUNT, "default": 2147483647}, numOfHosts={**COUNT, "default": 1}, idleTimeoutSeconds=COUNT,
        rayStartParams=TEXTS,
        resources=TEXTS, labels=TEXTS, template=pod, scaleStrategy=struct(workersToDelete=several(TEXT)),
    )  # fmt: skip
    scaler = struct(
        resources=core["ResourceRequirements"], image=TEXT, imagePullPolicy=TEXT, env=several(core["EnvVar"]),
        envFrom=several(core["EnvFromSource"]), volumeMounts=several(core["VolumeMount"]), securityContext=core["SecurityContext"],
        idleTimeoutSeconds=COUNT, upscalingMode={**TEXT, "enum": ["Default", "Aggressive", "Conservative"]}, version=TEXT,
    )  # fmt: skip
    return struct(
        "headGroupSpec", headGroupSpec=head, workerGroupSpecs=several(worker), rayVersion=TEXT, enableInTreeAutoscaling=FLAG,
        autoscalerOptions=scaler, headServiceAnnotations=TEXTS, suspend=FLAG, managedBy=TEXT, gcsFaultToleranceOptions=ANYTHING,
        upgradeStrategy=ANYTHING, authOptions=ANYTHING,
    )  # fmt: skip


def _ray_job(cluster: Schema, pod: Schema) -> Schema:
    return struct(
        activeDeadlineSeconds=COUNT, backoffLimit={**COUNT, "default": 0}, rayClusterSpec=cluster, submitterPodTemplate=pod,
        metadata=TEXTS,
        clusterSelector=TEXTS, submitterConfig=struct(backoffLimit=COUNT), managedBy=TEXT, deletionStrategy=ANYTHING, entrypoint=TEXT,
        runtimeEnvYAML=TEXT, jobId=TEXT, submissionMode={**TEXT, "default": "K8sJobMode"}, entrypointResources=TEXT,
        entrypointNumCpus=NUMBER,
        entrypointNumGpus=NUMBER, ttlSecondsAfterFinished={**COUNT, "default": 0}, shutdownAfterJobFinishes=FLAG, suspend=FLAG,
    )  # fmt: skip


def _jobset(job: Schema) -> Schema:
    depends = struct("name", "status", name=TEXT, status={**TEXT, "enum": ["Ready", "Complete"]})
    replicated = struct(
        "name", "template", name=TEXT, groupName={**TEXT, "default": "default"}, template=job, replicas={**COUNT, "default": 1},
        dependsOn=keyed(depends, "name"),
    )  # fmt: skip
    rule = struct(
        "name", "action", name=TEXT, action=TEXT, onJobFailureReasons=several(TEXT), onJobFailureMessagePatterns=several(TEXT),
        targetReplicatedJobs=several(TEXT),
    )  # fmt: skip
    return struct(
        replicatedJobs=keyed(replicated, "name"),
        network=struct(enableDNSHostnames=FLAG, subdomain=TEXT, publishNotReadyAddresses=FLAG),
        successPolicy=struct("operator", operator={**TEXT, "enum": ["All", "Any"]}, targetReplicatedJobs=several(TEXT)),
        failurePolicy=struct(maxRestarts=COUNT, restartStrategy={**TEXT, "default": "Recreate"}, rules=several(rule)),
        startupPolicy=struct("startupPolicyOrder", startupPolicyOrder={**TEXT, "enum": ["AnyOrder", "InOrder"]}),
        suspend=FLAG, coordinator=struct("replicatedJob", replicatedJob=TEXT, jobIndex=COUNT, podIndex=COUNT), managedBy=TEXT,
        ttlSecondsAfterFinished={**COUNT, "minimum": 0}, volumeClaimPolicies=several(ANYTHING),
    )  # fmt: skip


def _train_job(core: dict[str, Schema]) -> Schema:
    env = keyed(core["EnvVar"], "name")
    initializer = struct(storageUri=TEXT, env=env, secretRef=core["LocalObjectReference"])
    trainer = struct(
        image=TEXT, command=several(TEXT), args=several(TEXT), env=env, numNodes=COUNT, resourcesPerNode=core["ResourceRequirements"],
        numProcPerNode=EITHER,
    )  # fmt: skip
    reference = struct(
        "name", name=TEXT, apiGroup={**TEXT, "default": "trainer.kubeflow.org"}, kind={**TEXT, "default": "ClusterTrainingRuntime"}
    )
    manager = {**TEXT, "default": "trainer.kubeflow.org/trainjob-controller"}
    return struct(
        "runtimeRef", runtimeRef=reference, initializer=struct(dataset=initializer, model=initializer), trainer=trainer,
        runtimePatches={**keyed(_runtime_patch(core), "manager"), "maxItems": 16}, suspend={**FLAG, "default": False},
        activeDeadlineSeconds={"type": "integer", "format": "int64", "minimum": 1}, managedBy=manager,
    )  # fmt: skip


def _runtime_patch(core: dict[str, Schema]) -> Schema:
    container = struct(
        "name",
        name=TEXT,
        env=keyed(core["EnvVar"], "name"),
        volumeMounts=keyed(core["VolumeMount"], "name"),
        securityContext=core["SecurityContext"],
    )
    pod = struct(
        serviceAccountName=TEXT, volumes=keyed(core["Volume"], "name"), initContainers=keyed(container, "name"),
        containers=keyed(container, "name"),
        imagePullSecrets=several(core["LocalObjectReference"]), securityContext=core["PodSecurityContext"], nodeSelector=TEXTS,
        affinity=core["Affinity"], tolerations=several(core["Toleration"]), schedulingGates=several(struct("name", name=TEXT)),
        terminationGracePeriodSeconds={"type": "integer", "format": "int64"},
    )  # fmt: skip
    inner = struct(template=struct(metadata=METADATA, spec=pod))
    job = struct("name", name=TEXT, template=struct(metadata=METADATA, spec=inner))
    template = struct(metadata=METADATA, spec=struct(replicatedJobs=keyed(job, "name")))
    return struct("manager", manager=TEXT, time={**TEXT, "format": "date-time"}, trainingRuntimeSpec=struct(template=template))


def _runtime() -> Schema:
    return struct(mlPolicy=ANYTHING, podGroupPolicy=ANYTHING, template=struct(metadata=METADATA, spec=ANYTHING))


def _pytorch_job(pod: Schema) -> Schema:
    replica = struct(replicas=COUNT, template=pod, restartPolicy=TEXT)
    policy = struct(
        cleanPodPolicy=TEXT, ttlSecondsAfterFinished=COUNT, activeDeadlineSeconds=COUNT, backoffLimit=COUNT,
        schedulingPolicy=ANYTHING, suspend=FLAG,
        managedBy=TEXT,
    )  # fmt: skip
    replicas = {"type": "object", "additionalProperties": replica}
    return struct("pytorchReplicaSpecs", runPolicy=policy, elasticPolicy=ANYTHING, pytorchReplicaSpecs=replicas, nprocPerNode=TEXT)
