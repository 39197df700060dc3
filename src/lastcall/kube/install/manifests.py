"""The objects that install the webhook. One source: the YAML, the kustomize base and the Helm chart are made
from it."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lastcall.kube.inject.draft import Object
from lastcall.kube.inject.kinds import KINDS

if TYPE_CHECKING:
    from lastcall.kube.webhook.certificates import Pair

NAME = "lastcall-webhook"
DEFAULT_NAMESPACE = "lastcall"
AUTHORITY = "lastcall-webhook-ca"  # the Secret with the authority
_SERVED = "lastcall-webhook-tls"  # the Secret that cert-manager fills
_PORT = 8443
_USER = 65532  # an arbitrary unprivileged user
_FOLDER = "/etc/lastcall"
_LABELS = {"app.kubernetes.io/name": NAME, "app.kubernetes.io/part-of": "lastcall"}
_OPT_OUT = "lastcall.dev/webhook"  # a label: namespaces with the value "disabled" are left out
_SECONDS = 5  # how long an admission waits for the webhook


@dataclass(frozen=True)
class Installation:
    image: str
    namespace: str = DEFAULT_NAMESPACE
    replicas: Any = 2  # a number, or what a chart puts in its place
    authority: Pair | None = None  # None: cert-manager makes the certificate

    @property
    def host(self) -> str:
        """The host name by which the API server reaches the service."""
        return f"{NAME}.{self.namespace}.svc"


def objects(installation: Installation) -> list[Object]:
    """In the order in which they must be applied."""
    certificate = (
        [_secret(installation)] if installation.authority is not None else _cert_manager(installation)
    )
    return [
        _namespace(installation),
        *_account(installation),
        *certificate,
        _service(installation),
        _deployment(installation),
        _budget(installation),
        configuration(installation),
    ]


def configuration(installation: Installation, url: str | None = None) -> Object:
    """The MutatingWebhookConfiguration. `url`: of a webhook outside of the cluster, instead of the
    service."""
    service = {"name": NAME, "namespace": installation.namespace, "path": "/mutate", "port": 443}
    client: Object = {"service": service} if url is None else {"url": url}
    metadata = _named(NAME)
    if installation.authority is not None:
        client["caBundle"] = _base64(installation.authority.certificate)
    else:
        metadata["annotations"] = {"cert-manager.io/inject-ca-from": f"{installation.namespace}/{_SERVED}"}
    webhook = {
        "name": "webhook.lastcall.dev",
        "clientConfig": client,
        "rules": _rules(),
        "failurePolicy": "Ignore",  # jobs are still admitted if the webhook is down
        "timeoutSeconds": _SECONDS,
        "sideEffects": "None",
        "matchPolicy": "Equivalent",
        "reinvocationPolicy": "IfNeeded",  # also works if a later webhook inserts a container first
        "admissionReviewVersions": ["v1"],
        "namespaceSelector": {
            "matchExpressions": [
                {
                    "key": "kubernetes.io/metadata.name",
                    "operator": "NotIn",
                    "values": ["kube-system", installation.namespace],
                },
                {"key": _OPT_OUT, "operator": "NotIn", "values": ["disabled"]},
            ]
        },
    }
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": metadata,
        "webhooks": [webhook],
    }


def _rules() -> list[Object]:
    """Pods on their creation only: almost nothing in one can be changed later, and their updates are many."""
    rules = [_rule(["CREATE"], "", ["pods"]), _rule(["CREATE", "UPDATE"], "", ["namespaces"], "Cluster")]
    groups = {
        kind.group: [other.plural for other in KINDS if other.group == kind.group]
        for kind in KINDS
        if kind.group
    }
    return rules + [_rule(["CREATE", "UPDATE"], group, plurals) for group, plurals in groups.items()]


def _rule(operations: list[str], group: str, resources: list[str], scope: str = "Namespaced") -> Object:
    return {
        "operations": operations,
        "apiGroups": [group],
        "apiVersions": ["*"],
        "resources": resources,
        "scope": scope,
    }


def _namespace(installation: Installation) -> Object:
    labels = {**_LABELS, _OPT_OUT: "disabled", "pod-security.kubernetes.io/enforce": "restricted"}
    return {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": installation.namespace, "labels": labels},
    }


def _account(installation: Installation) -> list[Object]:
    """It may only read namespaces, for the annotations that are defaults there."""
    rule = {"apiGroups": [""], "resources": ["namespaces"], "verbs": ["get", "list", "watch"]}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": NAME}
    subject = {"kind": "ServiceAccount", "name": NAME, "namespace": installation.namespace}
    version = "rbac.authorization.k8s.io/v1"
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": _in(installation)},
        {"apiVersion": version, "kind": "ClusterRole", "metadata": _named(NAME), "rules": [rule]},
        {
            "apiVersion": version,
            "kind": "ClusterRoleBinding",
            "metadata": _named(NAME),
            "roleRef": reference,
            "subjects": [subject],
        },
    ]


def _secret(installation: Installation) -> Object:
    assert installation.authority is not None
    data = {
        "ca.crt": _base64(installation.authority.certificate),
        "ca.key": _base64(installation.authority.key),
    }
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _in(installation, AUTHORITY),
        "type": "Opaque",
        "data": data,
    }


def _cert_manager(installation: Installation) -> list[Object]:
    version = "cert-manager.io/v1"
    asked = {
        "secretName": _SERVED,
        "dnsNames": [installation.host],
        "privateKey": {"algorithm": "ECDSA", "size": 256, "rotationPolicy": "Always"},
        "issuerRef": {"name": NAME, "kind": "Issuer"},
    }
    return [
        {"apiVersion": version, "kind": "Issuer", "metadata": _in(installation), "spec": {"selfSigned": {}}},
        {"apiVersion": version, "kind": "Certificate", "metadata": _in(installation, _SERVED), "spec": asked},
    ]


def _service(installation: Installation) -> Object:
    port = {"name": "https", "port": 443, "targetPort": "https", "protocol": "TCP"}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _in(installation),
        "spec": {"selector": dict(_LABELS), "ports": [port]},
    }


def _budget(installation: Installation) -> Object:
    """One at a time. With minAvailable, a single replica could never be evicted, and its node never
    drained."""
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": dict(_LABELS)}}
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _in(installation),
        "spec": spec,
    }


def _deployment(installation: Installation) -> Object:
    spec = {
        "replicas": installation.replicas,
        "selector": {"matchLabels": dict(_LABELS)},
        "template": {"metadata": {"labels": dict(_LABELS)}, "spec": _pod(installation)},
    }
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": _in(installation), "spec": spec}


def _pod(installation: Installation) -> Object:
    apart = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": dict(_LABELS)}}
    secret = AUTHORITY if installation.authority is not None else _SERVED
    return {
        "serviceAccountName": NAME,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "affinity": {
            "podAntiAffinity": {
                "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": apart}]
            }
        },
        "containers": [_container(installation)],
        "volumes": [{"name": "certificates", "secret": {"secretName": secret, "defaultMode": 0o440}}],
    }


def _container(installation: Installation) -> Object:
    if installation.authority is not None:
        files = [
            "--ca-cert",
            f"{_FOLDER}/ca.crt",
            "--ca-key",
            f"{_FOLDER}/ca.key",
            "--name",
            installation.host,
        ]
    else:
        files = ["--tls-cert", f"{_FOLDER}/tls.crt", "--tls-key", f"{_FOLDER}/tls.key"]
    return {
        "name": "webhook",
        "image": installation.image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python3", "-m", "lastcall", "kube", "webhook"],
        "args": ["--port", str(_PORT), "--image", installation.image, *files],
        "ports": [{"name": "https", "containerPort": _PORT, "protocol": "TCP"}],
        "livenessProbe": _probe("/healthz", 20),
        "readinessProbe": _probe("/readyz", 5),
        # The API server may continue to send requests for a moment after the shutdown starts.
        "lifecycle": {"preStop": {"exec": {"command": ["python3", "-c", "import time; time.sleep(5)"]}}},
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "512Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "certificates", "mountPath": _FOLDER, "readOnly": True}],
    }


def _probe(path: str, period: int) -> Object:
    return {
        "httpGet": {"path": path, "port": "https", "scheme": "HTTPS"},
        "periodSeconds": period,
        "timeoutSeconds": 3,
    }


def _in(installation: Installation, name: str = NAME) -> Object:
    return {**_named(name), "namespace": installation.namespace}


def _named(name: str) -> Object:
    return {"name": name, "labels": dict(_LABELS)}


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()
