"""The definitions that the test cluster gets, as far as they can be looked at without one; and what the
webhook writes, by them."""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pydantic
import pytest
import yaml
from kubeflow_trainer_api import models

from helpers.kube.definitions import checks as kube_checks
from helpers.kube.definitions import kinds as kube_kinds
from helpers.kube.definitions import rules as kube_rules
from helpers.kube.definitions import schemas as kube_schemas
from helpers.kubeflow import objects as kubeflow_objects
from kube import objects
from lastcall.kube.inject import draft, inject

KINDS = {kind.name: kind for kind in kube_kinds.all_kinds()}
MODELS = {
    "TrainJob": models.TrainerV1alpha1TrainJob,
    "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
    "ClusterTrainingRuntime": models.TrainerV1alpha1ClusterTrainingRuntime,
    "JobSet": models.JobsetV1alpha2JobSet,
}
STORED = sorted(set(objects.OBJECTS) & set(KINDS))
WISHES = {
    "lastcall.dev/enabled": "true",
    "lastcall.dev/grace-seconds": "90",
    "lastcall.dev/kill-wait-seconds": "5.0",
    "lastcall.dev/storage": "claim/folder",
}


def whole(name: str) -> dict[str, Any]:
    (version,) = KINDS[name].definition()["spec"]["versions"]
    schema: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    return schema


def faults(item: dict[str, Any]) -> list[str]:
    schema = whole(item["kind"])
    return list(kube_checks.faults({key: item[key] for key in item if key != "metadata"}, schema))


def pod_fields() -> dict[str, Any]:
    spec: dict[str, Any] = KINDS["RayCluster"].spec["properties"]["headGroupSpec"]["properties"]["template"][
        "properties"
    ]["spec"]
    return dict(spec["properties"])


def fields(model: Any, path: str) -> Iterator[str]:
    """Where the fields of a model, and of the models in it, are in an object."""
    if model in (
        models.IoK8sApimachineryPkgApiResourceQuantity,
        models.IoK8sApimachineryPkgUtilIntstrIntOrString,
    ):
        return
    if model is models.IoK8sApimachineryPkgApisMetaV1ObjectMeta:
        return
    if isinstance(model, type) and issubclass(model, pydantic.BaseModel):
        for name, field in model.model_fields.items():
            yield (inner := f"{path}.{field.alias or name}")
            yield from fields(field.annotation, inner)
    origin, (*_, last) = typing.get_origin(model), (typing.get_args(model) or (None,))
    if origin is list or origin is dict:
        yield from fields(last, path + ("[]" if origin is list else "{}"))
    elif origin is typing.Union:
        for one in typing.get_args(model):
            yield from fields(one, path)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_field_of_the_published_models_is_in_the_definition(name: str) -> None:
    there = {path for path, _ in kube_schemas.walk(whole(name))}
    wanted = set(fields(MODELS[name], ""))
    assert len(wanted) > 100
    assert wanted - there == set()


@pytest.mark.parametrize("name", sorted(KINDS))
def test_a_definition_is_structural(name: str) -> None:
    for path, schema in kube_schemas.walk(whole(name)):
        assert "type" in schema or schema.get("x-kubernetes-int-or-string"), path
        assert not {"$ref", "anyOf", "oneOf", "allOf", "not", "title", "description", "$defs"} & set(
            schema
        ), path
        assert not ("properties" in schema and "additionalProperties" in schema), path
        assert set(schema.get("required", ())) <= set(schema.get("properties", ())), path
        assert all(
            key in schema["items"].get("required", ()) or "default" in schema["items"]["properties"][key]
            for key in schema.get("x-kubernetes-list-map-keys", ())
        ), path


def test_every_rule_is_of_a_field_that_its_model_has() -> None:
    for prefix, rules in kube_rules.BY_PREFIX.items():
        for name, said in rules.items():
            made = (kube_schemas.published if prefix else kube_schemas.generated)(f"{prefix}{name}")
            assert {key for key in said if key not in made} <= set(made["properties"]), name


def test_quantities_are_numbers_with_a_suffix_and_long_fields_are_long() -> None:
    pod = pod_fields()
    limits = pod["containers"]["items"]["properties"]["resources"]["properties"]["limits"][
        "additionalProperties"
    ]
    assert [list(kube_checks.faults(value, limits)) for value in (2, "500m", "1.5Gi", "1e3", ".5", "-1")] == [
        []
    ] * 6
    assert all(list(kube_checks.faults(value, limits)) for value in ("much", "1 Gi", "", 1.5, True))
    assert pod["terminationGracePeriodSeconds"]["format"] == "int64"
    assert pod["securityContext"]["properties"]["supplementalGroups"]["items"]["format"] == "int64"
    assert pod["priority"]["format"] == "int32"


@pytest.mark.parametrize("name", STORED)
def test_nothing_that_the_webhook_writes_is_dropped_or_refused(name: str) -> None:
    item = objects.make(name, "it")
    assert faults(item) == []
    item["metadata"]["annotations"] = {**WISHES}
    operations = inject.patch(item, options=inject.InjectOptions(image="lastcall:1"))
    assert len(operations) > 2
    assert faults(draft.applied(item, operations)) == []


def test_nothing_of_the_seeds_trainjob_is_dropped_or_refused() -> None:
    assert faults(kubeflow_objects.expected("it", ["bash", "-c", "true"])) == []
    assert faults(kubeflow_objects.RUNTIME) == []


def test_what_is_wrong_by_a_definition_is_said() -> None:
    item = objects.make("TrainJob", "it")
    item["spec"] |= {
        "unknown": 1,
        "suspend": "no",
        "runtimePatches": [{"manager": "a"}, {"manager": "a"}],
        "activeDeadlineSeconds": 0,
    }
    del item["spec"]["runtimeRef"]
    assert len(faults(item)) == 5


def definition(name: str = "rayjobs.ray.io", **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": name},
        "spec": spec,
    }


def test_definitions_of_a_folder_go_before_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a release has them: several in a file, among other objects."""
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x"}}
    documents = [service, definition(group="theirs"), None, definition("raycronjobs.ray.io")]
    (tmp_path / "release.yaml").write_text(yaml.dump_all(documents))
    (tmp_path / "README.md").write_text(": not YAML")
    monkeypatch.setenv("LASTCALL_KUBE_CRDS", str(tmp_path))
    found = {one["metadata"]["name"]: one["spec"].get("group") for one in kube_kinds.definitions()}
    ours = {f"{name.lower()}s.{kind.group}": kind.group for name, kind in KINDS.items()}
    assert found == {**ours, "rayjobs.ray.io": "theirs", "raycronjobs.ray.io": None}
    monkeypatch.delenv("LASTCALL_KUBE_CRDS")
    assert {one["metadata"]["name"]: one["spec"]["group"] for one in kube_kinds.definitions()} == ours


def test_what_another_cluster_added_to_a_definition_is_left_out(tmp_path: Path) -> None:
    given = definition(
        group="theirs", conversion={"strategy": "Webhook"}, versions=[{"name": "v1"}, {"name": "v1alpha1"}]
    )
    given["metadata"] |= {
        "uid": "1",
        "resourceVersion": "2",
        "annotations": {"controller-gen": "v0", kube_kinds._APPLIED: "{}"},
    }
    given["status"] = {"acceptedNames": {}}
    (tmp_path / "found.yml").write_text(yaml.dump({"apiVersion": "v1", "kind": "List", "items": [given]}))
    (found,) = kube_kinds.read(tmp_path)
    wanted = definition(group="theirs", versions=[{"name": "v1"}, {"name": "v1alpha1"}])
    wanted["metadata"]["annotations"] = {"controller-gen": "v0"}
    assert found == wanted


def test_the_items_of_a_list_of_definitions_may_leave_their_kind_out(tmp_path: Path) -> None:
    """As `kubectl get --raw` has them."""
    given = {
        key: value for key, value in definition(group="theirs").items() if key not in ("kind", "apiVersion")
    }
    (tmp_path / "raw.json").write_text(json.dumps({"kind": "CustomResourceDefinitionList", "items": [given]}))
    (found,) = kube_kinds.read(tmp_path)
    assert (found["kind"], found["apiVersion"]) == ("CustomResourceDefinition", "apiextensions.k8s.io/v1")


def test_a_folder_that_is_not_there_or_has_none_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="LASTCALL_KUBE_CRDS=.*nowhere is not a folder"):
        kube_kinds.read(tmp_path / "nowhere")
    (tmp_path / "service.yaml").write_text("kind: Service")
    with pytest.raises(ValueError, match="has no CustomResourceDefinition in its 1 YAML files"):
        kube_kinds.read(tmp_path)


def test_what_is_installed_has_no_default_that_an_old_server_takes_for_null(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = pod_fields()["imagePullSecrets"]
    assert secrets["items"]["properties"]["name"] == {"type": "string", "default": ""}
    assert kube_schemas.as_old_servers_take_it(secrets) == {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {"name": {"type": "string"}},
            "x-kubernetes-map-type": "atomic",
        },
    }
    assert kube_schemas.as_old_servers_take_it(pod_fields()["volumes"])["x-kubernetes-list-map-keys"] == [
        "name"
    ]
    kube_kinds.write(tmp_path)
    for folder in ("", str(tmp_path)):
        monkeypatch.setenv("LASTCALL_KUBE_CRDS", folder)
        assert '"default": ""' not in json.dumps(kube_kinds.definitions())


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    kube_kinds.write(tmp_path / "crds")
    read = {one["metadata"]["name"]: one["spec"] for one in kube_kinds.read(tmp_path / "crds")}
    assert read == {
        kind.definition()["metadata"]["name"]: kind.definition()["spec"] for kind in KINDS.values()
    }
