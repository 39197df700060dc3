from __future__ import annotations

import base64
import io
import json
import signal
import ssl
import stat
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.kube import objects
from helpers.kube.objects import ON, job, made, pod, protected, trainer
from helpers.processes import forkserver as nursery
from lastcall.cli import main
from lastcall.kube.webhook import certificates

HELD_BY_ITSELF = (
    "apiVersion: v1\nkind: Pod\nmetadata: {annotations: {lastcall.dev/enabled: 'true'}}\nspec: &a "
    "{containers: [{name: x}], b: [*a]}\n"
)
Said = tuple[int, str, str]


@pytest.fixture
def kube(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*words: object) -> Said:
        code = main.main(["kube", *map(str, words)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def test_inject_does_what_the_webhook_does_and_keeps_the_order(kube: Any, tmp_path: Path) -> None:
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"a": "ä: 1\nb"}}
    listed = {"apiVersion": "v1", "kind": "List", "items": [made("v1", "Pod", pod(), ON), config]}
    (tmp_path / "all.yaml").write_text(
        yaml.safe_dump_all([config, job(), listed, config], allow_unicode=True)
    )
    code, out, err = kube("inject", "-f", tmp_path / "all.yaml", "--image", "lastcall:1")
    first, second, third, last = yaml.safe_load_all(out)
    assert (code, err, first, last) == (0, "", config, config)
    assert second == protected(job())
    assert third == {**listed, "items": [protected(made("v1", "Pod", pod(), ON)), config]}


def test_inject_of_what_was_injected_changes_nothing(
    kube: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job()))
    _, once, _ = kube("inject", "-f", tmp_path / "job.yaml")
    monkeypatch.setattr(sys, "stdin", io.StringIO(once))
    assert kube("inject", "-f", "-") == (0, once, "")
    monkeypatch.setattr(sys, "stdin", io.StringIO(once))
    assert kube("inject", "-f", "-", "--diff") == (0, "", "")


@pytest.mark.parametrize(
    "text",
    ["1e-5", "1E5", "08", "0o17", "12345e67", "y", "N", "yes", "1:30", ".5", "1_000", "~", "-.inf", "0x1F"],
)
def test_a_text_that_kubernetes_would_take_for_something_else_is_quoted(
    kube: Any, tmp_path: Path, text: str
) -> None:
    """PyYAML sees no need to: a learning rate then comes back as a number, and kubectl refuses the whole
    job."""
    annotated = job()
    trainer(annotated)["args"] = ["--lr", text]
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps(annotated))
    code, out, _ = kube("inject", "-f", str(file))
    assert code == 0
    assert f"- '{text}'\n" in out
    assert "- --lr\n" in out


@pytest.mark.parametrize(
    ("plain", "out"),
    [
        ("22:22", "'22:22'"),  # PyYAML: 1342
        ("2024-01-01", "'2024-01-01'"),
        ("2024-01-01T00:00:00Z", "'2024-01-01T00:00:00Z'"),  # PyYAML: 2024-01-01 00:00:00+00:00
        ("=", "'='"),  # PyYAML: an error
        ("1e-5", "1.0e-05"),  # PyYAML: text
        ("08", "8.0"),
        ("0o17", "15"),
        ("017", "15"),
        ("0x1F", "31"),
        ("1_000", "1000"),
        ("y", "true"),
        ("N", "false"),
        ("on", "true"),
        ("~", "null"),
        ("1.5", "1.5"),
        ("1e", "'1e'"),
        ("v1.2.3", "v1.2.3"),
    ],
)
def test_what_has_no_quotes_is_what_kubectl_takes_it_for(
    kube: Any, tmp_path: Path, plain: str, out: str
) -> None:
    """As kubectl 1.32 says: kubectl annotate --local -f FILE -o json a=b."""
    (tmp_path / "x.yaml").write_text(f"apiVersion: example.com/v1\nkind: Other\nspec:\n  it: {plain}\n")
    code, said, _ = kube("inject", "-f", tmp_path / "x.yaml")
    assert (code, said.splitlines()[-1]) == (0, f"  it: {out}")


def test_a_text_with_a_rare_end_of_line_comes_out_as_it_was(kube: Any, tmp_path: Path) -> None:
    annotated = job()
    trainer(annotated)["args"] = ["a\x85b"]
    (tmp_path / "job.json").write_text(json.dumps(annotated))
    assert '- "a\\Nb"\n' in kube("inject", "-f", tmp_path / "job.json")[1]


def test_inject_shows_the_difference(kube: Any, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job()))
    _, out, _ = kube("inject", "-f", tmp_path / "job.yaml", "--diff")
    assert "+      terminationGracePeriodSeconds: 120\n" in out and not [
        line for line in out.splitlines()[2:] if line.startswith("-")
    ]


def test_inject_says_the_patch_and_its_reason_as_json(kube: Any, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job({"lastcall.dev/grace-seconds": "5"})))
    code, out, err = kube("inject", "-f", tmp_path / "job.yaml", "--json")
    (told,) = json.loads(out)["objects"]
    assert (code, told["object"], told["patch"], told["because"]) == (
        0,
        "Job x",
        [],
        "not enabled by an annotation",
    )
    assert told["warnings"] and told["warnings"][0] in err


def test_a_namespace_in_the_file_is_the_default_for_what_is_in_it(kube: Any, tmp_path: Path) -> None:
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team", "annotations": ON}}
    inside, outside = job({}, metadata={"namespace": "team"}), job({}, metadata={"namespace": "other"})
    (tmp_path / "all.yaml").write_text(yaml.safe_dump_all([inside, namespace, outside, job({})]))
    code, out, err = kube("inject", "-f", tmp_path / "all.yaml", "--image", "lastcall:1")
    assert (code, err.count("is NOT protected")) == (0, 2)  # F19: the last two, which nothing asks for
    assert list(yaml.safe_load_all(out)) == [protected(inside, namespace=ON), namespace, outside, job({})]


def test_a_wrong_annotation_of_a_namespace_in_the_file_is_refused_with_78(kube: Any, tmp_path: Path) -> None:
    (tmp_path / "n.yaml").write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Namespace",
                "metadata": {"name": "team", "annotations": {"lastcall.dev/enabled": "maybe"}},
            }
        )
    )
    code, out, err = kube("inject", "-f", tmp_path / "n.yaml")
    assert (code, out) == (78, "")
    assert "Namespace team: lastcall.dev/enabled" in err


def test_the_objects_of_a_list_of_one_kind_are_protected(kube: Any, tmp_path: Path) -> None:
    (tmp_path / "l.json").write_text(
        json.dumps({"apiVersion": "batch/v1", "kind": "JobList", "items": [job()]})
    )
    code, out, _ = kube("inject", "-f", tmp_path / "l.json", "--image", "lastcall:1")
    assert (code, yaml.safe_load(out)["items"]) == (0, [protected(job())])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no Kubernetes object"),
        (b"# nothing\n---\n", "no Kubernetes object"),
        (b"\x7fELF\x80\xff", "not text"),
        (b"a: !!int x", "not YAML"),
    ],
)
def test_a_file_without_objects_is_refused_with_78(
    kube: Any, tmp_path: Path, content: bytes, said: str
) -> None:
    """An empty answer would go on to kubectl, whose message says nothing of the file."""
    (tmp_path / "x").write_bytes(content)
    code, out, err = kube("inject", "-f", tmp_path / "x")
    assert (code, out) == (78, "")
    assert said in err


@pytest.mark.parametrize(
    "words", [("--namespace", "Not_One"), ("--namespace", ""), ("--image", ""), ("--image", "two words")]
)
def test_a_manifest_that_the_api_server_would_refuse_is_not_made(kube: Any, words: tuple[str, ...]) -> None:
    code, out, err = kube("manifest", *words)
    assert (code, out) == (78, "")
    assert words[0] in err


def test_inject_refuses_an_image_without_a_name(kube: Any, tmp_path: Path) -> None:
    """As of a variable that is not set: --image "$IMAGE"."""
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job()))
    code, out, err = kube("inject", "-f", tmp_path / "job.yaml", "--image", "")
    assert (code, out) == (78, "") and "--image ''" in err


def test_inject_refuses_a_wrong_value_with_78(kube: Any, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job({"lastcall.dev/enabled": True})))
    code, out, err = kube("inject", "-f", tmp_path / "job.yaml")
    assert (code, out) == (78, "") and err.startswith(
        "lastcall: Job x: lastcall.dev/enabled: True is not text. Put it in quotes"
    )


@pytest.mark.parametrize("text", ["a: [", "- 5", "just text", HELD_BY_ITSELF])
def test_inject_refuses_what_is_no_object(kube: Any, tmp_path: Path, text: str) -> None:
    (tmp_path / "job.yaml").write_text(text)
    code, out, err = kube("inject", "-f", tmp_path / "job.yaml")
    assert (code, out) == (78, "") and ("job.yaml" in err or "nested too deeply" in err)


def test_a_manifest_made_again_keeps_its_authority(kube: Any, tmp_path: Path) -> None:
    _, first, _ = kube("manifest", "--namespace", "guard")
    (tmp_path / "first.yaml").write_text(first)
    assert kube("manifest", "--namespace", "guard", "--ca-from", tmp_path / "first.yaml") == (0, first, "")
    assert kube("manifest", "--namespace", "guard")[1] != first


def test_a_manifest_as_json_is_a_list_that_kubectl_takes(kube: Any) -> None:
    found = json.loads(kube("manifest", "--json", "--image", "x:1")[1])
    assert (found.pop("apiVersion"), found.pop("kind"), len(found.pop("items")), found) == (
        "v1",
        "List",
        9,
        {},
    )


@pytest.mark.parametrize("form", ["kustomize", "helm"])
def test_several_files_go_into_a_directory(kube: Any, tmp_path: Path, form: str) -> None:
    code, out, _ = kube("manifest", "--format", form, "--output", tmp_path / "out", "--json")
    files = json.loads(out)["files"]
    assert (
        code == 0
        and sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.yaml"))
        == files
    )
    code, _, err = kube("manifest", "--format", form)
    assert code == 78 and "--output webhook" in err


def test_the_key_of_the_authority_is_for_this_user_alone(kube: Any, tmp_path: Path) -> None:
    """Rough edges of section F: files with the key were 0644, and `--output` without `--format` printed
    it."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "secret.yaml").write_text("an earlier one")
    kube("manifest", "--format", "kustomize", "--output", tmp_path / "out")
    assert stat.S_IMODE((tmp_path / "out" / "secret.yaml").stat().st_mode) == 0o600
    code, out, err = kube("manifest", "--output", tmp_path / "more")
    assert (code, out) == (78, "") and "--format kustomize" in err and not (tmp_path / "more").exists()


def test_a_wrong_authority_is_refused_with_78(kube: Any, tmp_path: Path) -> None:
    (tmp_path / "x").write_text("kind: ConfigMap")
    code, _, err = kube("manifest", "--ca-from", tmp_path / "x")
    assert code == 78 and "no Secret found" in err


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--ca-cert", "a"),
        ("--tls-cert", "a"),
        ("--ca-cert", "a", "--ca-key", "b", "--name", "c", "--tls-cert", "d"),
    ],
)
def test_a_webhook_without_one_certificate_is_refused_with_78(kube: Any, words: tuple[str, ...]) -> None:
    code, _, err = kube("webhook", *words)
    assert code == 78 and "--ca-cert, --ca-key and --name, or --tls-cert and --tls-key" in err


def test_a_webhook_whose_files_are_missing_says_which(kube: Any, tmp_path: Path) -> None:
    code, _, err = kube("webhook", "--tls-cert", tmp_path / "none.crt", "--tls-key", tmp_path / "none.key")
    assert code == 1 and "none.crt" in err


def test_copy_brings_the_package(kube: Any, tmp_path: Path) -> None:
    assert kube("copy", tmp_path / "there")[0] == 0
    assert (tmp_path / "there" / "site" / "sitecustomize.py").exists()


def test_the_webhook_serves_over_tls_and_ends_by_sigterm(tmp_path: Path) -> None:
    authority = certificates.authority()
    (tmp_path / "ca.crt").write_bytes(authority.certificate)
    (tmp_path / "ca.key").write_bytes(authority.key)
    words = [
        "--host",
        "127.0.0.1",
        "--port",
        "0",
        "--name",
        "127.0.0.1",
        "--ca-cert",
        tmp_path / "ca.crt",
        "--ca-key",
        tmp_path / "ca.key",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "lastcall", "kube", "webhook", *map(str, words)],
        stderr=subprocess.PIPE,
        env=nursery.environment(),
    )
    try:
        assert process.stderr is not None
        port = json.loads(process.stderr.readline())["port"]
        context = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
        request = urllib.request.Request(f"https://127.0.0.1:{port}/mutate", objects.review(job()))
        with urllib.request.urlopen(request, timeout=30, context=context) as answer:
            response = json.load(answer)["response"]
        assert json.loads(base64.b64decode(response["patch"]))
        line = json.loads(process.stderr.readline())
        assert (line["result"], line["kind"], line["name"]) == ("patched", "Job", "x")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == -signal.SIGTERM
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def test_f19_inject_warns_of_an_exit_code_that_gets_lost(kube: Any, tmp_path: Path) -> None:
    annotated = job()
    trainer(annotated)["command"] = ["bash", "-c", "python train.py | tee log"]
    (tmp_path / "job.yaml").write_text(json.dumps(annotated))
    code, out, err = kube("inject", "-f", tmp_path / "job.yaml")
    assert code == 0 and "pipefail" in err and "Job x" in err and "LASTCALL_ENABLED" in out


def test_f19_inject_says_what_comes_out_as_it_went_in(kube: Any, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}}
    for found, words in (
        ([job({})], ["Job x is NOT protected", 'lastcall.dev/enabled: "true"']),
        ([job({"lastcall.dev/enabled": "false"})], ["NOT protected", "lastcall.dev/enabled switches it off"]),
        ([config], ["no object in", "Job, CronJob"]),
        ([config, job(), job({})], ["Job x is NOT protected"]),
    ):
        file.write_text(yaml.safe_dump_all(found))
        code, out, err = kube("inject", "-f", file)
        assert code == 0 and all(word in err for word in words) and err.count("\n") == 1, err
        assert list(yaml.safe_load_all(out))[-1] == found[-1]
    told = json.loads(kube("inject", "-f", file, "--json")[1])
    assert [one["protected"] for one in told["objects"]] == [False, True, False]
