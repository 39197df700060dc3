"""The definitions of the kinds: where they come from, what is said of an object by them, and what of them
goes for the test cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.kube.definitions import checks, generated, old_server
from helpers.kube.definitions import kinds as kube_kinds
from helpers.kube.objects import protected
from helpers.kubeflow import objects as kubeflow_objects
from kube import objects

STORED = sorted(set(objects.OBJECTS) & set(kube_kinds.NAMES))
WISHES = {
    "lastcall.dev/enabled": "true",
    "lastcall.dev/grace-seconds": "90",
    "lastcall.dev/kill-wait-seconds": "5.0",
    "lastcall.dev/storage": "claim/folder",
}
GENERATED = {one["metadata"]["name"]: one for one in generated.definitions()}
projects_own = pytest.mark.skipif(
    kube_kinds.folder() is None, reason="the projects' definitions are not here"
)


@pytest.fixture(params=["the projects' own", "generated"])
def source(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whose definitions are asked. Where the projects' own are missing, it is the generated ones twice."""
    if request.param == "generated":
        monkeypatch.delenv(kube_kinds.FOLDER, raising=False)
        monkeypatch.setattr(kube_kinds, "BESIDE", Path("/nowhere"))
    return str(request.param)


def schemas(definitions: dict[str, Any]) -> list[tuple[str, checks.Schema]]:
    """Every schema in them, with where it is."""
    versions = [(name, version) for name, one in definitions.items() for version in one["spec"]["versions"]]
    return [
        (f"{name}/{version['name']}{path}", schema)
        for name, version in versions
        for path, schema in checks.walk(version["schema"]["openAPIV3Schema"])
    ]


@pytest.mark.usefixtures("source")
def test_every_construct_of_a_definition_is_checked() -> None:
    for path, schema in schemas(kube_kinds.definitions()):
        assert not set(schema) - checks.KNOWN, path
        assert "anyOf" not in schema or schema["x-kubernetes-int-or-string"], path


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize("name", STORED)
def test_nothing_that_the_webhook_writes_is_dropped_or_refused(name: str) -> None:
    item = objects.make(name, "it")
    assert kube_kinds.faults(item) == []
    item["metadata"]["annotations"] = {**WISHES}
    after = protected(item)
    assert after != item
    assert kube_kinds.faults(after) == []


@pytest.mark.usefixtures("source")
def test_nothing_of_the_seeds_trainjob_is_dropped_or_refused() -> None:
    assert kube_kinds.faults(kubeflow_objects.expected("it", ["bash", "-c", "true"])) == []
    assert kube_kinds.faults(kubeflow_objects.RUNTIME) == []


@pytest.mark.usefixtures("source")
def test_what_is_wrong_by_a_definition_is_said() -> None:
    item = objects.make("TrainJob", "it")
    item["spec"] |= {"unknown": 1, "suspend": "no", "runtimePatches": [{"manager": "a"}, {"manager": "a"}]}
    item["spec"]["trainer"] = {"env": [{"name": str(number)} for number in range(129)]}
    del item["spec"]["runtimeRef"]
    assert len(kube_kinds.faults(item)) == 5


@projects_own
def test_by_the_projects_own_limits_an_object_is_wrong() -> None:
    item = objects.make("JobSet", "it")
    (job,) = item["spec"]["replicatedJobs"]
    item["spec"] |= {"ttlSecondsAfterFinished": -1, "successPolicy": {"operator": "Some"}}
    job["template"]["spec"]["completions"] = 2**31
    job["template"]["spec"]["template"]["spec"]["containers"][0]["resources"] = {"limits": {"cpu": "much"}}
    wrong = {fault.partition(":")[0].rpartition(".")[2] for fault in kube_kinds.faults(item)}
    assert wrong == {"completions", "cpu", "ttlSecondsAfterFinished", "operator"}


@projects_own
def test_the_generated_definitions_have_no_place_that_the_projects_have_not() -> None:
    """But in a PyTorchJob, whose pods are those of an older Kubernetes."""
    theirs = {path for path, _ in schemas(kube_kinds.definitions())}
    others = {path for path, _ in schemas(GENERATED) if not path.startswith("pytorchjobs")} - theirs
    assert others == set()


@projects_own
def test_of_a_projects_definition_nothing_goes_but_what_the_old_server_does_not_take() -> None:
    theirs = kube_kinds.definitions()
    fitted = {name: old_server.fitted(one) for name, one in theirs.items()}
    gone: set[str] = set()
    for (path, before), (same, after) in zip(schemas(theirs), schemas(fitted), strict=True):
        assert path == same
        gone |= set(before) - set(after)
        assert before.get("default") == "" or after.get("default") == before.get("default"), path
        assert all(
            key in after["items"].get("required", ()) or "default" in after["items"]["properties"][key]
            for key in after.get("x-kubernetes-list-map-keys", ())
        ), path
    assert gone == {
        *("default", "x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-validations")
    }
    text = json.dumps(fitted)
    assert not any(word in text for word in ('"default": ""', "x-kubernetes-validations", "selectableFields"))
    assert max(len(json.dumps(one)) for one in fitted.values()) < 1_500_000  # as much as etcd takes


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
    found = {name: one["spec"].get("group") for name, one in kube_kinds.definitions().items()}
    ours = {name: one["spec"]["group"] for name, one in GENERATED.items()}
    assert found == {**ours, "rayjobs.ray.io": "theirs", "raycronjobs.ray.io": None}
    assert kube_kinds.missing() is None


def test_without_a_folder_ours_serve_and_a_line_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LASTCALL_KUBE_CRDS", "")
    monkeypatch.setattr(kube_kinds, "BESIDE", tmp_path / "nowhere")
    assert kube_kinds.definitions() == GENERATED
    assert set(GENERATED) == set(kube_kinds.NAMES.values())
    assert "generated ones serve" in str(kube_kinds.missing())
    monkeypatch.setattr(kube_kinds, "BESIDE", tmp_path)
    assert (kube_kinds.folder(), kube_kinds.missing()) == (tmp_path, None)


def test_what_another_cluster_added_to_a_definition_is_left_out(tmp_path: Path) -> None:
    schema = {"openAPIV3Schema": {"type": "object"}}
    versions = [{"name": name, "schema": schema} for name in ("v1", "v1alpha1")]
    given = definition(group="theirs", conversion={"strategy": "Webhook"}, versions=versions)
    notes = {"controller-gen": "v0", "kubectl.kubernetes.io/last-applied-configuration": "{}"}
    given["metadata"] |= {"uid": "1", "resourceVersion": "2", "annotations": notes}
    given["status"] = {"acceptedNames": {}}
    (tmp_path / "found.yml").write_text(yaml.dump({"apiVersion": "v1", "kind": "List", "items": [given]}))
    (found,) = kube_kinds.read(tmp_path).values()
    wanted = definition(group="theirs", versions=versions)
    wanted["metadata"]["annotations"] = {"controller-gen": "v0"}
    assert old_server.fitted(found) == wanted


def test_the_items_of_a_list_of_definitions_may_leave_their_kind_out(tmp_path: Path) -> None:
    """As `kubectl get --raw` has them."""
    given = {key: value for key, value in definition().items() if key not in ("kind", "apiVersion")}
    (tmp_path / "raw.json").write_text(json.dumps({"kind": "CustomResourceDefinitionList", "items": [given]}))
    assert list(kube_kinds.read(tmp_path)) == ["rayjobs.ray.io"]


def test_a_folder_that_is_not_there_or_has_none_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="LASTCALL_KUBE_CRDS=.*nowhere is not a folder"):
        kube_kinds.read(tmp_path / "nowhere")
    (tmp_path / "service.yaml").write_text("kind: Service")
    with pytest.raises(ValueError, match="has no CustomResourceDefinition in its 1 YAML files"):
        kube_kinds.read(tmp_path)
