"""The webhook's objects as YAML, as a kustomize base, and as a Helm chart."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass

import yaml

import lastcall
from lastcall.kube.inject.draft import Object
from lastcall.kube.install import manifests
from lastcall.kube.install.kube_yaml import load, text
from lastcall.kube.install.manifests import Installation
from lastcall.kube.webhook.certificates import Pair

# What stands in the chart's objects for a value of the chart. The number is put in without quotes afterwards.
_NAMESPACE = "{{ .Release.Namespace }}"
_IMAGE = "{{ .Values.image }}"
_REPLICAS = "{{ .Values.replicas }}"
_CRT, _KEY = b"{{ .Values.authority.crt }}", b"{{ .Values.authority.key }}"


def kustomize(installation: Installation) -> dict[str, str]:
    """File name -> content."""
    found = manifests.objects(installation)
    files = {_file(obj): text([obj]) for obj in found}
    base = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": list(files),
    }
    return {"kustomization.yaml": text([base]), **files}


def helm(installation: Installation) -> dict[str, str]:
    """The namespace is Helm's own (`--create-namespace`), so the chart has none. The authority is a value,
    created once with the chart: one created at each rendering would change at each upgrade."""
    authority = None if installation.authority is None else Pair(_CRT, _KEY)
    chart = Installation(_IMAGE, _NAMESPACE, _REPLICAS, authority)
    files = {
        f"templates/{_file(obj)}": _template(obj)
        for obj in manifests.objects(chart)
        if obj["kind"] != "Namespace"
    }
    about = {
        "apiVersion": "v2",
        "name": "lastcall-webhook",
        "version": lastcall.__version__,
        "appVersion": lastcall.__version__,
        "description": "One annotation protects a training job: lastcall's admission webhook",
    }
    return {"Chart.yaml": text([about]), "values.yaml": text([_values(installation)]), **files}


def _values(installation: Installation) -> Object:
    values: Object = {"image": installation.image, "replicas": installation.replicas}
    if installation.authority is not None:
        values["authority"] = {
            "crt": installation.authority.certificate.decode(),
            "key": installation.authority.key.decode(),
        }
    return values


def _template(obj: Object) -> str:
    made = text([obj]).replace(f"'{_REPLICAS}'", _REPLICAS)
    for value in (_CRT, _KEY):
        inner = value.decode().strip("{} ")
        made = made.replace(base64.b64encode(value).decode(), f"'{{{{ {inner} | b64enc }}}}'")
    return made


def _file(obj: Object) -> str:
    return f"{obj['kind'].lower()}.yaml"


@dataclass(frozen=True)
class WrongSecret(ValueError):
    """The given authority of an installation is not one."""

    because: str

    def __str__(self) -> str:
        return self.because


def authority_in(content: str) -> Pair:
    """Of a Secret, or of manifests with one in it: what `kube manifest` has written, or what kubectl gets."""
    try:
        documents = [one for one in load(content) if isinstance(one, Mapping)]
        data = next(one["data"] for one in documents if one.get("kind") == "Secret")
        return Pair(*(base64.b64decode(data[name], validate=True) for name in ("ca.crt", "ca.key")))
    except StopIteration:
        raise WrongSecret(
            f"no Secret found. Get it with: kubectl get secret -n NAMESPACE -o yaml {manifests.AUTHORITY}"
        ) from None
    except (yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise WrongSecret(
            f"it is not a Secret with ca.crt and ca.key: {type(error).__name__}: {error}"
        ) from None
