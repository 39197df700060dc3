from __future__ import annotations

import os
from pathlib import Path

import pytest

from lastcall.kube.jobs.kubectl import Forbidden, Kubectl, KubectlError, NotFound


def program(folder: Path, script: str) -> Kubectl:
    path = folder / "kubectl"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return Kubectl(str(path), "there", "team")


def test_context_and_namespace_come_before_what_is_for_a_command_in_the_pod(tmp_path: Path) -> None:
    kubectl = program(tmp_path, 'echo "$@"')
    assert kubectl.run("exec", "pod", "--", "sh", "-c", "x").split() == [
        "exec", "--context=there", "--namespace=team", "pod", "--", "sh", "-c", "x",
    ]  # fmt: skip
    assert Kubectl(kubectl.program).run("get", "pods").split() == ["get", "pods"]


def test_without_kubectl_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        KubectlError,
        match=r"cannot find kubectl. Install kubectl .* --kubectl "
        r"/path/to/kubectl",
    ):
        Kubectl().run("version")


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ('Error from server (NotFound): jobs.batch "x" not found', NotFound),
        ('error: the server doesn\'t have a resource type "rayjobs"', NotFound),
        ('Error from server (Forbidden): jobs.batch "x" is forbidden', Forbidden),
        ("The connection to the server 10.0.0.1 was refused", KubectlError),
    ],
)
def test_a_refusal_is_told_by_what_it_is_in_the_servers_own_words(
    tmp_path: Path, said: str, kind: type[KubectlError]
) -> None:
    (tmp_path / "said").write_text(said)
    with pytest.raises(KubectlError) as caught:
        program(tmp_path, f"cat '{tmp_path / 'said'}' >&2; exit 1").run("get", "jobs.batch", "x")
    assert type(caught.value) is kind and said in str(caught.value)


def test_its_log_does_not_hide_what_it_says(tmp_path: Path) -> None:
    logged = (
        'E1116 10:25:12.46 3724 memcache.go:265] "Unhandled Error" err="couldn\'t get current server API '
        'group list: Get x"\n'
    )
    (tmp_path / "said").write_text(logged * 5 + "The connection to the server localhost:8080 was refused")
    with pytest.raises(
        KubectlError, match="failed: The connection to the server localhost:8080 was refused$"
    ):
        program(tmp_path, f"cat '{tmp_path / 'said'}' >&2; exit 1").run("get", "x")


def test_a_refusal_without_a_word_has_its_exit_code(tmp_path: Path) -> None:
    with pytest.raises(KubectlError, match="`kubectl get .*` failed: exit code 3"):
        program(tmp_path, "exit 3").run("get", "x")


def test_one_that_does_not_answer_is_not_waited_for(tmp_path: Path) -> None:
    with pytest.raises(KubectlError, match="did not answer within 0 s"):
        program(tmp_path, "exec sleep 60").run("get", "x", seconds=0.2)


@pytest.mark.parametrize("text", ["", "no json", "[1]"])
def test_an_answer_that_is_no_object_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(KubectlError, match="did not return"):
        program(tmp_path, f"echo '{text}'").read("get", "x")


def test_a_file_that_cannot_be_run_is_said_to_be_one(tmp_path: Path) -> None:
    path = tmp_path / "kubectl"
    path.write_bytes(b"\x7fELF broken")
    path.chmod(0o755)
    assert os.access(path, os.X_OK)
    with pytest.raises(KubectlError, match="cannot start"):
        Kubectl(str(path)).run("get", "x")
