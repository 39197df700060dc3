from __future__ import annotations

import pytest

from lastcall.kube.inject import annotations as noted
from lastcall.kube.inject.annotations import AnnotationError, Claim, wishes


def refused(given: dict[str, object], *, ray: bool = False) -> str:
    with pytest.raises(AnnotationError) as caught:
        wishes(given, ray=ray)
    return str(caught.value)


def test_without_annotations_nothing_is_asked_for() -> None:
    assert (
        wishes(None) == wishes({}) == wishes({"app": "x", "lastcall.device/enabled": "?"}) == noted.Wishes()
    )


def test_each_annotation_is_read() -> None:
    asked = wishes(
        {
            "lastcall.dev/enabled": "true",
            "lastcall.dev/kill-wait-seconds": "1.5",
            "lastcall.dev/grace-seconds": "200",
            "lastcall.dev/directory": "/data/run/",
            "lastcall.dev/storage": "shared/exp1",
        }
    )
    assert (asked.enabled, asked.kill_wait, asked.grace, asked.directory) == (True, 1.5, 200.0, "/data/run")
    assert asked.storage == Claim("shared", "exp1")


def test_an_object_wins_over_its_namespace_name_by_name() -> None:
    namespace = {"lastcall.dev/enabled": "true", "lastcall.dev/grace-seconds": "60"}
    assert wishes({"lastcall.dev/grace-seconds": "300"}, namespace).grace == 300
    assert wishes({}, namespace).enabled
    assert not wishes({"lastcall.dev/enabled": "false"}, namespace).enabled


def test_rays_own_names_count_on_rays_kinds_only() -> None:
    given = {"ray.io/jit-checkpoint-enabled": "true", "ray.io/jit-checkpoint-kill-wait": "5.0"}
    assert wishes(given, ray=True).kill_wait == 5.0
    assert not wishes(given).enabled
    assert wishes(given).idle == tuple(given)


def test_ours_wins_over_rays_name_on_one_object_but_not_from_the_namespace() -> None:
    assert (
        wishes({"lastcall.dev/enabled": "false", "ray.io/jit-checkpoint-enabled": "true"}, ray=True).enabled
        is False
    )
    assert (
        wishes({"ray.io/jit-checkpoint-enabled": "false"}, {"lastcall.dev/enabled": "true"}, ray=True).enabled
        is False
    )


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("enabled", "maybe", "is neither yes nor no"),
        ("enabled", "", "is neither yes nor no"),
        ("kill-wait-seconds", "soon", "is not a number of seconds"),
        ("kill-wait-seconds", "-1", "is negative"),
        ("grace-seconds", "nan", "is not a finite number"),
        ("grace-seconds", "0", "leaves no time"),
        ("grace-seconds", "1e9", "is more than a week"),
        ("directory", "runs/x", "is not an absolute path"),
        ("directory", "/", "is not an absolute path"),
        ("directory", "/a/../b", "cannot be mounted"),
        ("directory", "/a:b", "cannot be mounted"),
        ("storage", "My_Claim", "does not begin with the name"),
        ("storage", "", "does not begin with the name"),
        ("storage", "shared/../secret", "points outside the volume"),
    ],
)
def test_a_wrong_value_is_refused_and_the_annotation_named(name: str, value: str, said: str) -> None:
    message = refused({f"lastcall.dev/{name}": value})
    assert (
        message.startswith(f"lastcall.dev/{name}: {value!r} ")
        and said in message
        and f'lastcall.dev/{name}: "' in message
    )


@pytest.mark.parametrize("value", [True, 5, None, ["true"]])
def test_a_value_without_quotes_is_refused_with_the_remedy(value: object) -> None:
    assert 'Put it in quotes, for example: lastcall.dev/enabled: "true"' in refused(
        {"lastcall.dev/enabled": value}
    )


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    assert "Did you mean lastcall.dev/grace-seconds?" in refused({"lastcall.dev/grace-second": "5"})
    assert "Did you mean ray.io/jit-checkpoint-kill-wait?" in refused(
        {"ray.io/jit-checkpoint-killwait": "5"}, ray=True
    )


def test_what_a_pause_has_written_down_asks_for_nothing() -> None:
    assert wishes({"lastcall.dev/paused-parallelism": "4"}) == noted.Wishes()


def test_a_long_name_or_value_does_not_fill_the_screen() -> None:
    assert len(refused({"lastcall.dev/" + "x" * 100_000: ""})) < 1000
    assert len(refused({"lastcall.dev/storage": "X" * 100_000})) < 1000


def test_a_kill_wait_longer_than_the_grace_is_refused() -> None:
    message = refused({"lastcall.dev/kill-wait-seconds": "60", "lastcall.dev/grace-seconds": "30"})
    assert "lastcall.dev/kill-wait-seconds: 60 is longer than lastcall.dev/grace-seconds: 30" in message


def test_an_annotation_without_enabled_is_told_to_be_idle() -> None:
    assert wishes({"lastcall.dev/grace-seconds": "60"}).idle == ("lastcall.dev/grace-seconds",)
    assert wishes({"lastcall.dev/grace-seconds": "60"}, {"lastcall.dev/enabled": "true"}).idle == ()
    assert wishes({"lastcall.dev/grace-seconds": "60", "lastcall.dev/enabled": "false"}).idle == ()


def test_storage_is_mounted_at_the_directory_or_where_the_seed_mounts_it() -> None:
    assert wishes({"lastcall.dev/storage": "pvc://shared/a/b/"}).where() == "/mnt/kubeflow-checkpoints"
    assert wishes({"lastcall.dev/storage": "shared", "lastcall.dev/directory": "/ckpt"}).where() == "/ckpt"
    assert wishes({}).where() is None
