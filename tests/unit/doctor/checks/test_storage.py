from __future__ import annotations

from pathlib import Path

import pytest

from helpers.core.bare_core import mounted
from lastcall.doctor.checks import storage
from lastcall.doctor.checks.storage import Mount
from lastcall.storage import files

TABLE = """\
27 1 254:0 / / rw,relatime - overlay overlay rw,lowerdir=/a
28 27 0:25 / /data rw - nfs4 server:/export rw,vers=4.2
29 27 0:26 / /data/ro ro,nosuid - ext4 /dev/sdb rw
30 27 0:27 / /mnt/with\\040blank rw shared:7 - xfs /dev/sdc ro
31 27 0:28 / /two rw - ext4 /dev/sdd rw
32 31 0:29 / /two rw - tmpfs tmpfs rw
nonsense
"""


@pytest.mark.parametrize(
    ("path", "point", "kind", "read_only"),
    [
        ("/home/x", "/", "overlay", False),
        ("/data/runs", "/data", "nfs4", False),
        ("/data/ro/runs", "/data/ro", "ext4", True),
        ("/database", "/", "overlay", False),
        ("/mnt/with blank/x", "/mnt/with blank", "xfs", True),
        ("/two/x", "/two", "tmpfs", False),
    ],
)
def test_the_deepest_and_last_mount_counts(path: str, point: str, kind: str, read_only: bool) -> None:
    assert storage.mount_of(Path(path), TABLE) == Mount(point, kind, read_only)


def test_the_mounts_of_this_machine_are_read() -> None:
    mount = storage.mount_of(Path("/proc/self"))
    assert mount is not None and (mount.point, mount.kind) == ("/proc", "proc")


@pytest.mark.parametrize(
    ("kind", "level"),
    [
        ("tmpfs", "risk"),
        ("ramfs", "risk"),
        ("overlay", "risk"),
        ("proc", "risk"),
        ("fuse.gcsfuse", "warning"),
        ("nfs4", "ok"),
        ("ext4", "ok"),
        ("lustre", "ok"),
    ],
)
def test_a_place_is_judged_by_what_outlives_the_machine(kind: str, level: str) -> None:
    assert storage.check_place(Path("/data/runs"), Mount("/data", kind, False)).level == level


def test_tmp_is_a_risk_but_not_a_volume_that_is_mounted_in_it(tmp_path: Path) -> None:
    assert storage.check_place(Path("/tmp/runs"), Mount("/", "ext4", False)).level == "risk"
    assert storage.check_place(Path("/tmp"), Mount("/tmp", "xfs", False)).level == "risk"
    assert storage.check_place(Path("/tmp/volume/runs"), Mount("/tmp/volume", "ext4", False)).level == "ok"
    assert storage.check_place(Path("/x"), None).level == "ok"


def test_a_place_where_nothing_can_be_made_is_found() -> None:
    found = storage.check_writable(Path("/proc/runs"), None)
    assert found.level == "risk" and "is not writable" in found.says and found.remedy


def test_rights_are_tried_and_not_guessed(tmp_path: Path) -> None:
    assert storage.check_writable(tmp_path / "a" / "b", None).level == "ok"
    assert list(tmp_path.iterdir()) == []
    assert storage.check_writable(tmp_path, Mount(str(tmp_path), "ext4", True)).level == "risk"


def test_a_file_in_the_place_of_the_directory_is_found(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    found = storage.check_writable(tmp_path / "run", None)
    assert found.level == "risk" and "is a file" in found.says


def test_room_is_compared_with_the_next_checkpoint(tmp_path: Path) -> None:
    with mounted("tmpfs", "size=32m", tmp_path / "small") as place:

        def levels(needed: int | None, spare: int = 0) -> list[tuple[str, str]]:
            return [(item.name, item.level) for item in storage.check_room(place / "run", needed, spare)]

        assert levels(None) == levels(5_000_000) == [("space", "ok")]
        assert levels(20_000_000) == [("space", "warning")]
        assert levels(40_000_000) == [("space", "risk")]
        assert levels(40_000_000, spare=60_000_000) == [("space", "ok")]


def test_too_few_inodes_are_found(tmp_path: Path) -> None:
    with mounted("tmpfs", "size=32m,nr_inodes=50", tmp_path / "few") as place:
        assert [(item.name, item.level) for item in storage.check_room(place, 1000, 0)] == [
            ("inodes", "risk"),
            ("space", "ok"),
        ]


def test_the_write_test_measures_and_leaves_nothing_behind(tmp_path: Path) -> None:
    speed = storage.measure(tmp_path / "later", 2, 8 * 1024 * 1024)
    assert speed is not None and speed.nbytes == 8 * 1024 * 1024 and speed.bandwidth > 0
    assert list(tmp_path.iterdir()) == []


def test_the_write_test_takes_a_quarter_of_the_room_at_most(tmp_path: Path) -> None:
    with mounted("tmpfs", "size=32m", tmp_path / "small") as place:
        speed = storage.measure(place, 2)
        assert speed is not None and speed.nbytes == 8 * 1024 * 1024
    with mounted("tmpfs", "size=8m", tmp_path / "tiny") as place:
        found, none = storage.check_speed(place, 2)
        assert found.level == "ok" and "too little space" in found.says and none is None


def test_a_write_test_that_fails_is_a_risk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "own_name", lambda: "taken")
    (tmp_path / ".lastcall-doctor-taken.tmp").mkdir()
    found, speed = storage.check_speed(tmp_path, 2)
    assert found.level == "risk" and speed is None
