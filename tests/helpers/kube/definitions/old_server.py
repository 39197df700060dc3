"""A project's definition as the Kubernetes 1.20 of tests/kube takes it.

What goes, and why the tests lose nothing by it:

- `x-kubernetes-validations`: rules in CEL, of 1.23. This server would drop them itself; `kubectl apply`
  refuses them. Those about fields that lastcall writes say that these never change, which
  tests/property/test_kube_definitions.py looks at without them.
- `selectableFields`: what `kubectl get --field-selector` may ask for, of 1.30. Nothing here asks.
- the default "" of a name. This server, as it is built here, takes an empty text for null, and refuses it. A
  name that is missing stays missing, which every reader takes for the same.
- the keys of a list where one is neither required nor has a default, as after that (imagePullSecrets): every
  version refuses such a definition. The list is a plain one then, and takes two items with the same name, as
  Kubernetes itself does in a pod.
- `conversion`, which is a webhook of the project's controller, and what another cluster has added to a
  definition that was read from it: every version is taken as it is stored.
"""

from __future__ import annotations

from helpers.kube.definitions.checks import Schema

_TOO_NEW = {"x-kubernetes-validations", "selectableFields"}
_LIST = {"x-kubernetes-list-type", "x-kubernetes-list-map-keys"}
_ELSEWHERE = "kubectl.kubernetes.io/last-applied-configuration"


def fitted(definition: Schema) -> Schema:
    given, spec = definition["metadata"], definition["spec"]
    notes = {key: value for key, value in given.get("annotations", {}).items() if key != _ELSEWHERE}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": given["name"], "annotations": notes},
        "spec": {
            **{key: value for key, value in spec.items() if key != "conversion"},
            "versions": [_version(version) for version in spec["versions"]],
        },
    }


def _version(version: Schema) -> Schema:
    schema = {"openAPIV3Schema": _schema(version["schema"]["openAPIV3Schema"])}
    return {**{key: value for key, value in version.items() if key not in _TOO_NEW}, "schema": schema}


def _schema(given: Schema) -> Schema:
    made = {
        key: value for key, value in given.items() if key not in _TOO_NEW and (key, value) != ("default", "")
    }
    if "properties" in made:
        made["properties"] = {name: _schema(inner) for name, inner in made["properties"].items()}
    for key in ("items", "additionalProperties"):
        if isinstance(made.get(key), dict):
            made[key] = _schema(made[key])
    if not all(_always_there(made["items"], key) for key in made.get("x-kubernetes-list-map-keys", ())):
        made = {key: value for key, value in made.items() if key not in _LIST}
    return made


def _always_there(schema: Schema, field: str) -> bool:
    return field in schema.get("required", ()) or "default" in schema["properties"][field]
