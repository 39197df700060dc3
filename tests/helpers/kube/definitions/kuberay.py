"""KubeRay's RayCluster, RayJob and RayService (ray.io/v1), written from its Go types: it publishes no models.

Read as they stood in 2026: the cluster after `networkPolicy` and `tlsOptions` had come, job and service with
`deletionRules` and `clusterUpgradeOptions`. Its rules in CEL are left out, and its second version, v1alpha1.
"""

from __future__ import annotations

from helpers.kube.definitions.rules import QUANTITY, Schema, by, one_of
from helpers.kube.definitions.schemas import (
    COUNT,
    FLAG,
    LONG,
    NUMBER,
    TEXT,
    TEXTS,
    TIME,
    generated,
    named,
    published,
    several,
    struct,
)

_DELETIONS = one_of("DeleteCluster", "DeleteWorkers", "DeleteSelf", "DeleteNone")


def core(name: str) -> Schema:
    return published(f"IoK8sApiCoreV1{name}")


def cluster() -> Schema:
    return struct(
        "headGroupSpec",
        headGroupSpec=_head(),
        workerGroupSpecs=several(_worker()),
        rayVersion=TEXT,
        enableInTreeAutoscaling=FLAG,
        autoscalerOptions=_scaler(),
        headServiceAnnotations=TEXTS,
        suspend=FLAG,
        managedBy=TEXT,
        gcsFaultToleranceOptions=_store(),
        upgradeStrategy=struct(type={**TEXT, **one_of("Recreate", "None")}),
        historyServerOptions=_history(),
        networkPolicy=_network(),
        authOptions=struct(
            enableK8sTokenAuth=FLAG, secretName=TEXT, mode={**TEXT, **one_of("disabled", "token")}
        ),
        tlsOptions=struct(enabled=FLAG),
    )


def _head() -> Schema:
    kinds = one_of("Exact", "Prefix", "ImplementationSpecific")
    ingress = struct(host=TEXT, path=TEXT, pathType={**TEXT, **kinds}, tls=several(generated("V1IngressTLS")))
    return struct(
        "template",
        template=core("PodTemplateSpec"),
        headService=generated("V1Service"),
        enableIngress=FLAG,
        ingressOptions=ingress,
        resources=TEXTS,
        labels=TEXTS,
        rayStartParams=TEXTS,
        serviceType=TEXT,
    )


def _worker() -> Schema:
    return struct(
        "groupName",
        "maxReplicas",
        "minReplicas",
        "template",
        suspend=FLAG,
        groupName=TEXT,
        replicas={**COUNT, "default": 0},
        minReplicas={**COUNT, "default": 0},
        maxReplicas={**COUNT, "default": 2147483647},
        idleTimeoutSeconds=COUNT,
        priority={**COUNT, "default": 0},
        resources=TEXTS,
        labels=TEXTS,
        rayStartParams=TEXTS,
        template=core("PodTemplateSpec"),
        scaleStrategy=struct(workersToDelete=several(TEXT)),
        numOfHosts={**COUNT, "default": 1},
    )


def _scaler() -> Schema:
    return struct(
        resources=core("ResourceRequirements"),
        image=TEXT,
        imagePullPolicy=TEXT,
        securityContext=core("SecurityContext"),
        idleTimeoutSeconds=COUNT,
        upscalingMode={**TEXT, **one_of("Default", "Aggressive", "Conservative")},
        version={**TEXT, **one_of("v1", "v2")},
        env=several(core("EnvVar")),
        envFrom=several(core("EnvFromSource")),
        volumeMounts=several(core("VolumeMount")),
        command=several(TEXT),
        args=several(TEXT),
    )


def _store() -> Schema:
    credential = struct(value=TEXT, valueFrom=core("EnvVarSource"))
    storage = struct(
        claimName=TEXT, size=QUANTITY, storageClassName=TEXT, accessModes=several(TEXT), subPath=TEXT,
        deletionPolicy={**TEXT, **one_of("DeleteWithCluster", "Retain")},
    )  # fmt: skip
    return struct(
        backend={**TEXT, **one_of("redis", "rocksdb")}, redisUsername=credential, redisPassword=credential,
        externalStorageNamespace=TEXT, redisAddress=TEXT, storage=storage,
    )  # fmt: skip


def _history() -> Schema:
    collector = struct(
        image=TEXT, imagePullPolicy=TEXT, resources=core("ResourceRequirements"), env=several(core("EnvVar"))
    )
    return struct(collectorOptions=collector)


def _network() -> Schema:
    ingress, egress = (several(generated(f"V1NetworkPolicy{way}Rule")) for way in ("Ingress", "Egress"))
    rules = struct(ingressRules=ingress, egressRules=egress)
    groups = struct("groupName", groupName=TEXT, ingressRules=ingress, egressRules=egress)
    mode = {**TEXT, **one_of("DenyAll", "DenyAllIngress", "DenyAllEgress", default="DenyAll")}
    return struct(mode=mode, head=rules, worker=rules, workerGroups=several(groups, **by("groupName")))


def cluster_status() -> Schema:
    texts = ("podIP", "serviceIP", "podName", "serviceName")
    counts = (
        "readyWorkerReplicas",
        "availableWorkerReplicas",
        "desiredWorkerReplicas",
        "minWorkerReplicas",
        "maxWorkerReplicas",
    )
    desired = ("desiredCPU", "desiredMemory", "desiredGPU", "desiredTPU")
    return struct(
        state=TEXT,
        lastUpdateTime={**TIME, "nullable": True},
        stateTransitionTimes=named(TIME),
        endpoints=TEXTS,
        reason=TEXT,
        head=struct(**dict.fromkeys(texts, TEXT)),
        conditions=_conditions(),
        observedGeneration=LONG,
        **dict.fromkeys(counts, COUNT),
        **dict.fromkeys(desired, QUANTITY),
    )


def _conditions() -> Schema:
    return several(published("IoK8sApimachineryPkgApisMetaV1Condition"), **by("type"))


def job() -> Schema:
    return struct(
        activeDeadlineSeconds=COUNT,
        backoffLimit={**COUNT, "default": 0},
        rayClusterSpec=cluster(),
        submitterPodTemplate=core("PodTemplateSpec"),
        metadata=TEXTS,
        clusterSelector=TEXTS,
        submitterConfig=struct(backoffLimit=COUNT),
        managedBy=TEXT,
        deletionStrategy=_deletion(),
        entrypoint=TEXT,
        runtimeEnvYAML=TEXT,
        jobId=TEXT,
        submissionMode={**TEXT, "default": "K8sJobMode"},
        entrypointResources=TEXT,
        entrypointNumCpus=NUMBER,
        entrypointNumGpus=NUMBER,
        ttlSecondsAfterFinished={**COUNT, "default": 0},
        shutdownAfterJobFinishes=FLAG,
        suspend=FLAG,
    )


def _deletion() -> Schema:
    policy = struct(policy={**TEXT, **_DELETIONS})
    condition = struct(
        jobStatus={**TEXT, **one_of("SUCCEEDED", "FAILED")}, jobDeploymentStatus={**TEXT, **one_of("Failed")},
        ttlSeconds={**COUNT, "default": 0, "minimum": 0},
    )  # fmt: skip
    rule = struct("condition", "policy", policy={**TEXT, **_DELETIONS}, condition=condition)
    return struct(onSuccess=policy, onFailure=policy, deletionRules=several(rule, minItems=1))


def job_status() -> Schema:
    texts = (
        "jobId",
        "rayClusterName",
        "dashboardURL",
        "jobStatus",
        "jobDeploymentStatus",
        "reason",
        "message",
    )
    counts = {name: {**COUNT, "default": 0} for name in ("succeeded", "failed")}
    return struct(
        rayJobInfo=struct(startTime=TIME, endTime=TIME),
        startTime=TIME,
        endTime=TIME,
        rayClusterStatus=cluster_status(),
        observedGeneration=LONG,
        **dict.fromkeys(texts, TEXT),
        **counts,
    )


def service() -> Schema:
    options = struct(
        "gatewayClassName",
        "intervalSeconds",
        "stepSizePercent",
        maxSurgePercent={**COUNT, "default": 100},
        stepSizePercent=COUNT,
        intervalSeconds=COUNT,
        gatewayClassName=TEXT,
    )
    return struct(
        "rayClusterConfig",
        rayClusterConfig=cluster(),
        serveConfigV2=TEXT,
        serveService=generated("V1Service"),
        upgradeStrategy=struct(type=TEXT, clusterUpgradeOptions=options),
        excludeHeadPodFromServeSvc=FLAG,
        rayClusterDeletionDelaySeconds={**COUNT, "minimum": 0},
        serviceUnhealthySecondThreshold=COUNT,
        deploymentUnhealthySecondThreshold=COUNT,
    )


def service_status() -> Schema:
    deployment = struct(status=TEXT, message=TEXT)
    application = struct(status=TEXT, message=TEXT, serveDeploymentStatuses=named(deployment))
    one = struct(
        applicationStatuses=named(application),
        rayClusterName=TEXT,
        rayClusterStatus=cluster_status(),
        targetCapacity=COUNT,
        trafficRoutedPercent=COUNT,
        lastTrafficMigratedTime=TIME,
    )
    return struct(
        conditions=_conditions(),
        lastUpdateTime=TIME,
        serviceStatus=TEXT,
        activeServiceStatus=one,
        pendingServiceStatus=one,
        numServeEndpoints=COUNT,
        observedGeneration=LONG,
    )
