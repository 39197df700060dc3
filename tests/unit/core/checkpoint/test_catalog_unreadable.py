"""A checkpoint that cannot be read, or moved: what is damage, what is not, and which one the run goes on
from."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.core.bare_core import State, World
from lastcall import errors
from lastcall.core.checkpoint import record as records
from lastcall.core.checkpoint.catalog import Catalog
from lastcall.core.checkpoint.retention import Keep
from lastcall.core.engine import digest
from lastcall.storage import errnos
from lastcall.storage import files as storage
from lastcall.types import Kind


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errnos, "WAITS", (0.0, 0.0))


def history(world: World, *steps: int) -> State:
    state = State()
    for step in steps:
        state.step(step)
        world.save(state, step, Kind.MANUAL)
    return state


def fails(monkeypatch: pytest.MonkeyPatch, name: str, code: int, times: int = 10**6) -> None:
    """open() of this file fails so often."""
    real, left = os.open, [times]

    def opens(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if str(path).endswith(name) and not flags & os.O_WRONLY and left[0] > 0:
            left[0] -= 1
            raise OSError(code, os.strerror(code), str(path))
        return real(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", opens)


def names(world: World) -> list[str]:
    return sorted(path.name for path in world.catalog.root.iterdir() if path.name.startswith("checkpoint"))


# ---- C2, C3: what an errno means ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "lastcall.json"])
@pytest.mark.parametrize("code", [errno.ESTALE, errno.EMFILE, errno.EACCES, errno.ETIMEDOUT, errno.EINTR])
def test_c2_a_passing_error_of_the_only_checkpoint_costs_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, code: int, name: str
) -> None:
    history(world, 50)
    fails(monkeypatch, f"checkpoint-50/{name}", code, times=1)
    found = world.restore(State())
    assert found is not None and found.record.step == 50 and names(world) == ["checkpoint-50"]


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "lastcall.json"])
def test_c2_one_that_lasts_stops_the_start_and_moves_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    history(world, 40, 50)
    fails(monkeypatch, f"checkpoint-50/{name}", errno.ESTALE)
    with pytest.raises(errors.UnreadableError, match=r"checkpoint-50.*ESTALE.*Start it again"):
        world.restore(State())
    if name == "lastcall.json":
        with pytest.raises(errors.UnreadableError, match="checkpoint-50"):
            world.catalog.clean()
    assert names(world) == ["checkpoint-40", "checkpoint-50"]


def test_c2_a_directory_that_cannot_be_listed_is_not_empty(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    history(world, 50)

    def refuse(path: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(errors.UnreadableError, match="cannot be listed"):
        world.restore(State())


class Sectors(storage.Files):
    """A disk with a bad sector in the file that is open under this name."""

    def __init__(self, name: str, code: int) -> None:
        self.name, self.code = name, code

    def pread(self, fd: int, data: memoryview, offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(self.name):
            raise OSError(self.code, os.strerror(self.code))
        return super().pread(fd, data, offset)


@pytest.mark.parametrize(
    "code", [errno.EIO, errno.ENODATA, errno.EUCLEAN, errno.EREMOTEIO, errno.EILSEQ, errno.EBADMSG]
)
def test_c3_a_bad_sector_is_damage_and_the_older_checkpoint_serves(tmp_path: Path, code: int) -> None:
    with World(tmp_path / "run", Sectors("checkpoint-40/model.safetensors", code)) as world:
        history(world, 20, 40)
        found = world.restore(State())
        assert found is not None and found.record.step == 20
        assert names(world) == ["checkpoint-20", "checkpoint-40.damaged-0"]


def test_c2_what_cannot_be_looked_at_is_not_rotated_and_costs_no_save(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    history(world, 1, 2, 3)
    fails(monkeypatch, "checkpoint-2/lastcall.json", errno.ESTALE)
    assert world.catalog.prune(Keep(limit=1)) == []
    assert world.catalog.find("no such save") is None


# ---- H7: other versions ------------------------------------------------------------------------------------


def rewrite(world: World, step: int, change: Callable[[dict[str, Any]], None], *, sign: bool = True) -> None:
    path = world.catalog.root / f"checkpoint-{step}" / records.NAME
    body = json.loads(path.read_bytes())
    change(body)
    if sign:
        body.pop("digest", None)
        body["digest"] = digest.of(json.dumps(body, sort_keys=True).encode())
    path.write_text(json.dumps(body))


OTHERS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "newer": (lambda body: body.update(format=2), "is of format 2, and lastcall .* reads format 1"),
    "newer, with its version": (
        lambda body: body.update(format=7, version="3.1.0"),
        r"pip install lastcall-3\.1\.0-py3-none-any\.whl",
    ),
    "older": (lambda body: body.update(format=0, version=""), "older lastcall"),
    "a field more": (lambda body: body.update(shards=[]), "does not know what it says .shards"),
    "a field less": (lambda body: body.pop("sequence"), "no sequence"),
    "another kind": (lambda body: body.update(kind="teleported"), "the kind 'teleported'"),
    "files of another shape": (
        lambda body: body["files"][0].update(compressed=True),
        "a file with .*compressed",
    ),
    "another digest": (
        lambda body: body.update(algorithm="blake4", version="99.0"),
        "'blake4' cannot be checked here",
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_h7_a_checkpoint_of_another_version_is_refused_and_stays(world: World, case: str) -> None:
    change, words = OTHERS[case]
    history(world, 3, 5)
    rewrite(world, 5, change)
    for start in (world.catalog.clean, world.catalog.entries, lambda: world.restore(State())):
        with pytest.raises(errors.FormatError, match=f"checkpoint-5: .*{words}"):
            start()
    assert names(world) == ["checkpoint-3", "checkpoint-5"]


def test_h7_a_record_without_a_version_is_read_as_ever(world: World) -> None:
    history(world, 5)
    rewrite(world, 5, lambda body: body.pop("version"))
    (entry,) = world.catalog.entries()
    assert entry.record.version == "" and json.loads(entry.record.to_json()).get("version") is None


def test_h7_a_damaged_record_is_damage_whatever_its_fields_say(world: World) -> None:
    history(world, 5)
    rewrite(world, 5, lambda body: body.update(shards=[]), sign=False)
    (said,) = world.catalog.clean()
    assert "does not match its own digest" in said


# ---- H2: folders that cannot be moved ----------------------------------------------------------------------


class Overlay(storage.Files):
    """Folders that were there at the start come from a lower layer: overlayfs does not rename them."""

    def __init__(self, root: Path) -> None:
        # so that no new folder gets the number of one of them
        self._held = [os.open(path, os.O_RDONLY) for path in root.iterdir()]
        self.lower = {os.fstat(fd).st_ino for fd in self._held}

    def __del__(self) -> None:
        for fd in self._held:
            os.close(fd)

    def _check(self, path: Path) -> None:
        if path.is_dir() and path.stat().st_ino in self.lower:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    def rename(self, old: Path, new: Path) -> None:
        self._check(old)
        super().rename(old, new)

    def exchange(self, one: Path, other: Path) -> None:
        self._check(one)
        self._check(other)
        super().exchange(one, other)


@pytest.fixture
def overlaid(tmp_path: Path) -> World:
    with World(tmp_path / "run") as below:
        history(below, 1, 2, 3)
    path = tmp_path / "run" / "checkpoint-3" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    return World(tmp_path / "run", Overlay(tmp_path / "run"))


def test_h2_a_damaged_checkpoint_of_a_lower_layer_is_set_aside_and_the_older_serves(overlaid: World) -> None:
    with overlaid as world:
        found = world.restore(State())
        assert found is not None and found.record.step == 2
        assert names(world) == ["checkpoint-1", "checkpoint-2", "checkpoint-3.damaged-0"]
        assert len(list((world.catalog.root / "checkpoint-3.damaged-0").iterdir())) > 3


def test_h2_one_that_cannot_be_moved_at_all_is_passed_over(
    overlaid: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with overlaid as world:
        monkeypatch.setattr(world.files, "mkdir", refuse)
        for _ in range(2):  # every start
            found = world.restore(State())
            assert found is not None and found.record.step == 2
        assert names(world) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]


def test_h2_rotation_removes_what_it_cannot_move(overlaid: World) -> None:
    with overlaid as world:
        state = State()
        world.restore(state)
        world.save(state, 4, Kind.MANUAL)
        world.save(state, 5, Kind.MANUAL)
        assert [path.name for path in world.catalog.prune(Keep(limit=2))] == ["checkpoint-2", "checkpoint-1"]
        assert [name for name in names(world) if "damaged" not in name] == ["checkpoint-4", "checkpoint-5"]


def test_h2_a_step_of_a_lower_layer_is_saved_again(overlaid: World) -> None:
    with overlaid as world:
        state = State()
        world.restore(state)
        state.step(2)
        entry = world.save(state, 2)
        assert (
            entry.path.name == "checkpoint-2"
            and Catalog(world.catalog.root, storage.Files()).entries()[0].record == entry.record
        )


def test_h2_a_stranger_of_a_lower_layer_keeps_its_name(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoint-4").mkdir(parents=True)
    (tmp_path / "run" / "checkpoint-4" / "pytorch_model.bin").write_bytes(b"theirs")
    with World(tmp_path / "run", Overlay(tmp_path / "run")) as world:
        entry = world.save(State(), 4)
        assert entry.path.name == "checkpoint-4.replaced-0" and world.catalog.entries() == [entry]
        assert (tmp_path / "run" / "checkpoint-4" / "pytorch_model.bin").read_bytes() == b"theirs"


def _overlay(folder: Path) -> str:
    """Empty where an overlay can be mounted, by whoever runs this."""
    command = (
        f"cd {folder} && mkdir -p l u w m && mount -t overlay none -o "
        "lowerdir=l,upperdir=u,workdir=w,userxattr m && umount m"
    )
    done = subprocess.run(["unshare", "-Urm", "sh", "-c", command], capture_output=True, text=True)
    return done.stderr.strip() if done.returncode else ""


def test_h2_on_a_real_overlay(tmp_path: Path) -> None:
    over = tmp_path / "over"
    over.mkdir()
    if why := _overlay(over):
        pytest.skip(f"no overlay can be mounted here: {why}")
    with World(over / "l" / "run") as below:
        history(below, 1, 2, 3)
    path = over / "l" / "run" / "checkpoint-3" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    code = f"""
import sys; sys.path[:0] = {[str(Path(__file__).parents[3])]!r}
from pathlib import Path
from helpers.core.bare_core import State, World
from lastcall.core.checkpoint.retention import Keep
from lastcall.types import Kind
with World(Path({str(over / "m" / "run")!r})) as world:
    state = State()
    print(world.restore(state).path.name, sorted(p.name for p in world.catalog.root.glob("checkpoint-*")))
    for step in (2, 4, 5): world.save(state, step, Kind.MANUAL)
    world.catalog.prune(Keep(limit=2))
    print(sorted(entry.path.name for entry in world.catalog.entries()))
"""
    (over / "code.py").write_text(code)
    mount = (
        f"cd {over} && mount -t overlay none -o lowerdir=l,upperdir=u,workdir=w,userxattr m && "
        f"{sys.executable} code.py"
    )
    done = subprocess.run(["unshare", "-Urm", "sh", "-c", mount], capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "checkpoint-2 ['checkpoint-1', 'checkpoint-2', 'checkpoint-3.damaged-0']",
        "['checkpoint-4', 'checkpoint-5']",
    ], done.stderr
