from __future__ import annotations

from typing import Any

import pytest

from helpers.kube.objects import ON, every, job, made, pod, protected, trainer, trainjob, variables
from lastcall.kube.inject import inject, kinds, package_volume
from lastcall.kube.inject.annotations import AnnotationError
from lastcall.kube.inject.draft import at
from lastcall.kube.inject.inject import InjectOptions

EVERY = every(ON)


def templates(obj: dict[str, Any]) -> list[dict[str, Any]]:
    kind = kinds.of(obj)
    assert kind is not None
    return [at(obj, template.path) for template in kind.find(obj)]


@pytest.mark.parametrize("obj", [*every({}), *every({"app": "x"}), trainjob({})], ids=lambda obj: obj["kind"])
def test_without_an_annotation_nothing_changes(obj: dict[str, Any]) -> None:
    assert inject.patch(obj, options=InjectOptions(image="lastcall:1")) == []


@pytest.mark.parametrize("obj", [*EVERY, trainjob()], ids=lambda obj: obj["kind"])
@pytest.mark.parametrize("image", [None, "lastcall:1"])
def test_the_patch_of_a_patched_object_is_empty(obj: dict[str, Any], image: str | None) -> None:
    after = protected(obj, image=image)
    assert after != obj
    assert inject.patch(after, options=InjectOptions(image=image)) == []


@pytest.mark.parametrize("obj", EVERY, ids=lambda obj: obj["kind"])
def test_every_template_of_every_kind_is_protected(obj: dict[str, Any]) -> None:
    for template in templates(protected(obj)):
        spec, container = template["spec"], template["spec"]["containers"][0]
        assert spec["terminationGracePeriodSeconds"] == 120
        assert [one["name"] for one in spec["initContainers"]] == ["lastcall-install"]
        assert spec["volumes"] == [{"name": "lastcall", "emptyDir": {}}]
        assert container["volumeMounts"] == [{"name": "lastcall", "mountPath": "/opt/lastcall"}]
        assert container["lifecycle"] == {"preStop": {"exec": {"command": package_volume.PRE_STOP}}}
        said = variables(container)
        assert said["LASTCALL_GRACE_SECONDS"] == "120" and said["PYTHONPATH"] == "/opt/lastcall/site"
        assert said["LASTCALL_STOP_FILE"] == "/opt/lastcall/stop-main"


def test_a_job_gets_our_variables_and_torchruns() -> None:
    asked = {**ON, "lastcall.dev/kill-wait-seconds": "2.50", "lastcall.dev/directory": "/ckpt"}
    assert variables(trainer(protected(job(asked), image=None))) == {
        "LASTCALL_ENABLED": "1",
        "LASTCALL_KILL_WAIT_SECONDS": "2.50",
        "LASTCALL_DIRECTORY": "/ckpt",
        "LASTCALL_GRACE_SECONDS": "120",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "120",
        "LASTCALL_STOP_FILE": "/opt/lastcall/stop-main",
    }


@pytest.mark.parametrize(
    ("path", "said"), [("/tmp/bye", "/tmp/bye"), ("/dev/termination-log", None), ("", None)]
)
def test_a_message_elsewhere_than_usual_is_found(path: str, said: str | None) -> None:
    obj = job()
    trainer(obj)["terminationMessagePath"] = path
    assert variables(trainer(protected(obj))).get("LASTCALL_TERMINATION_LOG") == said


def test_a_ray_cluster_gets_the_variables_of_the_seed_and_a_drain_below_the_grace() -> None:
    asked = {"ray.io/jit-checkpoint-enabled": "true", "ray.io/jit-checkpoint-kill-wait": "5.0"}
    for template in templates(protected(every(asked)[0], image=None)):
        assert variables(template["spec"]["containers"][0]) == {
            "RAY_TRAIN_JIT_CHECKPOINT_ENABLED": "true",
            "RAY_TRAIN_JIT_CHECKPOINT_KILL_WAIT": "5.0",
            "LASTCALL_GRACE_SECONDS": "120",
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "110",
            "LASTCALL_STOP_FILE": "/opt/lastcall/stop-main",
        }


def test_sidecars_and_init_containers_are_left_alone() -> None:
    obj = job()
    obj["spec"]["template"]["spec"] = {
        **pod("train", "proxy"),
        "initContainers": [{"name": "fetch", "image": "x"}],
    }
    spec = protected(obj)["spec"]["template"]["spec"]
    assert spec["containers"][1] == {"name": "proxy", "image": "train"}
    assert spec["initContainers"][0] == {"name": "fetch", "image": "x"}


@pytest.mark.parametrize(
    "given", [{"value": "0"}, {"valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}, {}]
)
@pytest.mark.parametrize("name", ["LASTCALL_ENABLED", "RAY_TRAIN_JIT_CHECKPOINT_ENABLED"])
def test_a_variable_of_the_user_is_never_overwritten(name: str, given: dict[str, Any]) -> None:
    for obj in (job(), EVERY[0]):
        container = templates(obj)[0]["spec"]["containers"][0]
        before = {"name": name, **given}
        container["env"] = [before]
        env = templates(protected(obj))[0]["spec"]["containers"][0]["env"]
        assert env[0] == before
        assert [one["name"] for one in env if "ENABLED" in one["name"]] == [name]
        del container["env"]


def test_the_grace_is_raised_and_never_lowered() -> None:
    def seconds(present: int | None, asked: str | None) -> tuple[Any, Any]:
        spec: dict[str, Any] = {} if present is None else {"terminationGracePeriodSeconds": present}
        wanted = {} if asked is None else {"lastcall.dev/grace-seconds": asked}
        after = protected(job({**ON, **wanted}, **spec))
        return after["spec"]["template"]["spec"].get("terminationGracePeriodSeconds"), variables(
            trainer(after)
        )["LASTCALL_GRACE_SECONDS"]

    assert seconds(None, None) == seconds(30, None) == (120, "120")
    assert seconds(600, None) == seconds(600, "300") == (600, "600")
    assert seconds(30, "90.5") == (91, "91")
    assert seconds(None, "20") == (None, "30")  # Kubernetes gives 30
    assert seconds(0, "20") == (20, "20")


def test_a_long_kill_wait_makes_the_default_grace_longer() -> None:
    after = protected(job({**ON, "lastcall.dev/kill-wait-seconds": "100"}))
    assert after["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 160


def test_our_folder_comes_in_front_of_the_users_python_path() -> None:
    obj = job()
    trainer(obj)["env"] = [{"name": "PYTHONPATH", "value": "/app:/lib"}]
    assert variables(trainer(protected(obj)))["PYTHONPATH"] == "/opt/lastcall/site:/app:/lib"
    assert variables(trainer(protected(obj, image=None)))["PYTHONPATH"] == "/app:/lib"


def test_a_python_path_from_elsewhere_is_left_alone_with_a_warning() -> None:
    obj = job()
    source = {"name": "PYTHONPATH", "valueFrom": {"configMapKeyRef": {"name": "a", "key": "b"}}}
    trainer(obj)["env"] = [source]
    made_of = inject.inject(obj, options=InjectOptions(image="lastcall:1"))
    assert trainer(protected(obj))["env"][0] == source
    assert any("container main: PYTHONPATH has a valueFrom" in warning for warning in made_of.warnings)


def test_a_hook_of_the_user_stays_and_is_warned_of() -> None:
    obj = job()
    trainer(obj)["lifecycle"] = {"preStop": {"exec": {"command": ["flush"]}}}
    assert trainer(protected(obj))["lifecycle"] == {"preStop": {"exec": {"command": ["flush"]}}}
    (warning,) = inject.inject(obj, options=InjectOptions()).warnings
    assert "container main has a preStop hook" in warning
    trainer(obj)["lifecycle"] = {"postStart": {"exec": {"command": ["warm"]}}}
    assert set(trainer(protected(obj))["lifecycle"]) == {"postStart", "preStop"}


def test_a_volume_of_our_name_that_is_not_ours_is_not_written_to() -> None:
    obj = job(volumes=[{"name": "lastcall", "persistentVolumeClaim": {"claimName": "x"}}])
    after = protected(obj)
    assert "initContainers" not in after["spec"]["template"]["spec"] and not {
        "volumeMounts",
        "lifecycle",
    } & set(trainer(after))
    assert "LASTCALL_STOP_FILE" not in variables(trainer(after)) and "LASTCALL_ENABLED" in variables(
        trainer(after)
    )
    assert (
        "is in use: neither the package nor the stop file"
        in inject.inject(obj, options=InjectOptions(image="lastcall:1")).warnings[0]
    )


def test_a_mount_of_the_user_at_our_place_stays() -> None:
    obj = job()
    trainer(obj)["volumeMounts"] = [{"name": "own", "mountPath": "/opt/lastcall/"}]
    assert trainer(protected(obj))["volumeMounts"] == trainer(obj)["volumeMounts"]


def test_the_init_container_runs_as_the_training_does() -> None:
    obj = job()
    trainer(obj)["securityContext"] = {
        "runAsUser": 1000,
        "runAsNonRoot": True,
        "privileged": True,
        "readOnlyRootFilesystem": False,
    }
    (install,) = protected(obj)["spec"]["template"]["spec"]["initContainers"]
    assert install["securityContext"] == {
        "runAsUser": 1000,
        "runAsNonRoot": True,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_a_sidecar_that_another_webhook_puts_first_afterwards_is_left_alone() -> None:
    obj = protected(made("v1", "Pod", pod(), ON))
    obj["spec"]["containers"].insert(0, {"name": "proxy", "image": "proxy"})
    assert inject.patch(obj, options=InjectOptions(image="lastcall:1")) == []


def test_a_wrong_annotation_in_a_template_is_refused_with_the_object() -> None:
    obj = job({})
    obj["spec"]["template"]["metadata"] = {"annotations": {"lastcall.dev/enabled": "sure"}}
    with pytest.raises(AnnotationError, match="lastcall.dev/enabled: 'sure'"):
        inject.patch(obj, options=InjectOptions())


def test_storage_is_mounted_once_and_not_over_what_is_there() -> None:
    obj = job({**ON, "lastcall.dev/storage": "shared/exp1", "lastcall.dev/directory": "/ckpt"})
    after = protected(obj)
    assert {"name": "lastcall-storage", "mountPath": "/ckpt", "subPath": "exp1"} in trainer(after)[
        "volumeMounts"
    ]
    assert {"name": "lastcall-storage", "persistentVolumeClaim": {"claimName": "shared"}} in after["spec"][
        "template"
    ]["spec"]["volumes"]
    trainer(obj)["volumeMounts"] = [{"name": "own", "mountPath": "/ckpt/"}]
    assert [mount["name"] for mount in trainer(protected(obj))["volumeMounts"]] == ["own", "lastcall"]


def test_a_saved_pod_does_not_count_on_the_backoff_limit_of_its_job() -> None:
    (saved, disrupted) = protected(job(restartPolicy="Never"))["spec"]["podFailurePolicy"]["rules"]
    assert saved == {
        "action": "Ignore",
        "onExitCodes": {"containerName": "main", "operator": "In", "values": [75]},
    }
    assert disrupted["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]


def test_the_exit_code_that_is_ignored_is_the_users_own() -> None:
    obj = job(restartPolicy="Never")
    for value, code in (("3", 3), ("x", 75)):
        trainer(obj)["env"] = [{"name": "LASTCALL_EXIT_CODE", "value": value}]
        assert protected(obj)["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [code]


def test_a_job_keeps_its_own_failure_policy_and_gets_none_that_kubernetes_would_refuse() -> None:
    assert "podFailurePolicy" not in protected(job(restartPolicy="OnFailure"))["spec"]
    obj = job(restartPolicy="Never")
    obj["spec"]["podFailurePolicy"] = {"rules": []}
    assert protected(obj)["spec"]["podFailurePolicy"] == {"rules": []}
    obj = job(restartPolicy="Never")
    obj["spec"]["podReplacementPolicy"] = "TerminatingOrFailed"
    assert "podFailurePolicy" not in protected(obj)["spec"]


def test_a_pytorchjob_that_decides_by_exit_code_gets_one_that_is_tried_again() -> None:
    obj = made(
        "kubeflow.org/v1",
        "PyTorchJob",
        {"pytorchReplicaSpecs": {"Worker": {"restartPolicy": "ExitCode", "template": {"spec": pod()}}}},
        ON,
    )
    (template,) = templates(protected(obj))
    assert variables(template["spec"]["containers"][0])["LASTCALL_EXIT_CODE"] == "138"


def test_what_a_controller_made_takes_nothing_from_the_namespace() -> None:
    owned = [{"apiVersion": "batch/v1", "kind": "CronJob", "controller": True}]
    assert inject.patch(job({}), options=InjectOptions(), namespace=ON)
    assert not inject.patch(
        job({}, metadata={"ownerReferences": owned}), options=InjectOptions(), namespace=ON
    )
    assert inject.patch(job(ON, metadata={"ownerReferences": owned}), options=InjectOptions(), namespace=None)


def test_an_object_that_says_no_beats_its_namespace() -> None:
    assert not inject.patch(job({"lastcall.dev/enabled": "false"}), options=InjectOptions(), namespace=ON)


def test_an_annotation_without_effect_is_warned_of() -> None:
    assert inject.inject(job({"lastcall.dev/grace-seconds": "60"}), options=InjectOptions()).warnings == (
        'lastcall.dev/grace-seconds has no effect without lastcall.dev/enabled: "true"',
    )
    (warning,) = inject.inject(
        job({**ON, "ray.io/jit-checkpoint-enabled": "true"}), options=InjectOptions()
    ).warnings
    assert "only applies to kinds of ray.io" in warning


@pytest.mark.parametrize(
    "spec", [{"terminationGracePeriodSeconds": "5"}, {"volumes": "x"}, {"initContainers": {}}]
)
def test_an_object_of_another_shape_is_left_to_the_api_server(spec: dict[str, Any]) -> None:
    found = inject.inject(job(**spec), options=InjectOptions(image="lastcall:1"))
    assert found.operations == () and found.because.startswith("left alone")


PIPED = ["bash", "-c", "set -e; python train.py 2>&1 | tee log.txt"]


def said_of(obj: dict[str, Any]) -> list[str]:
    return [
        warning
        for warning in inject.inject(obj, options=InjectOptions()).warnings
        if "looks finished" in warning
    ]


def with_command(
    obj: dict[str, Any], *, command: list[str] | None = None, args: list[str] | None = None
) -> dict[str, Any]:
    for template in templates(obj):
        template["spec"]["containers"][0] |= {"command": command} if command else {}
        template["spec"]["containers"][0] |= {"args": args} if args else {}
    return obj


@pytest.mark.parametrize("obj", every(ON), ids=lambda obj: obj["kind"])
def test_f19_an_exit_code_that_gets_lost_is_warned_of_where_it_ends_the_job(obj: dict[str, Any]) -> None:
    ends = obj["kind"] in ("PyTorchJob", "JobSet", "Job", "CronJob")
    found = said_of(with_command(obj, command=PIPED))
    assert len(found) == ends, found
    assert all("`tee log.txt`" in one and "set -o pipefail" in one and len(one) <= 256 for one in found)


def test_f19_of_a_pod_its_restart_policy_decides() -> None:
    for policy, warned in (("Always", 0), ("OnFailure", 1), ("Never", 1)):
        obj = made("v1", "Pod", pod(restartPolicy=policy), ON)
        assert len(said_of(with_command(obj, command=PIPED))) == warned, policy


@pytest.mark.parametrize(
    ("command", "args", "words"),
    [
        (["/bin/sh", "-c"], ["python train.py | tee log"], "in a pipe"),
        (None, PIPED, "in a pipe"),
        (["bash", "-c", "python train.py || true"], None, "turns every exit code into 0"),
        (["bash", "-c", "python train.py; echo done"], None, "`echo done`"),
        (["env", "A=1", "sh", "-c", "torchrun t.py & wait"], None, "in the background"),
        (["bash", "-c", f"python train.py | tee {'x' * 500}"], None, "in a pipe"),
        (["bash", "-o", "pipefail", "-c", "set -o pipefail; python train.py | tee log"], None, None),
        (["bash", "-c", "exec python train.py"], None, None),
        (["bash", "-c", "pip install x && python train.py"], None, None),
        (["lastcall", "run", "--", *PIPED], None, None),
        (["python", "train.py"], ["--lr", "1"], None),
        (["bash", "/app/train.sh"], None, None),  # a file of the image, not of the webhook
        ([1], None, None),
        (None, None, None),
    ],
)
def test_f19_commands_are_read_as_the_doctor_reads_them(command: Any, args: Any, words: str | None) -> None:
    found = said_of(with_command(job(), command=command, args=args))
    assert [words in one and len(one) <= 256 for one in found if words] == [True] * bool(words) and len(
        found
    ) == bool(words)


def test_f19_no_file_of_the_webhook_itself_is_read(tmp_path: Any) -> None:
    (tmp_path / "train.sh").write_text("#!/bin/bash\npython train.py | tee log\n")
    assert not said_of(with_command(job(), command=["bash", str(tmp_path / "train.sh")]))


def test_f19_the_command_of_a_trainjob_is_looked_at() -> None:
    assert len(said_of(trainjob(trainer={"command": PIPED}))) == 1
