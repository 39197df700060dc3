"""The tree that an init container copies, used by real interpreters that have no lastcall."""

from __future__ import annotations

import ast
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from helpers.processes import interpreters
from helpers.processes.forkserver import PATIENCE, ROOT, environment
from helpers.processes.interpreters import outside, run
from lastcall import errors
from lastcall.kube.inject import package_volume

PROBE = ROOT / "tests" / "e2e" / "scripts" / "auto_probe.py"
WHERE = "import sys; print(getattr(sys.modules.get('lastcall'), '__file__', None))"


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter of an environment in which lastcall is not installed."""
    return interpreters.venv(tmp_path_factory.mktemp("bare") / "venv")


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("mount") / "opt" / "lastcall"
    package_volume.copy(target)
    return target


def on(target: Path, **more: str) -> dict[str, str]:
    given = outside(**more)
    path = [str(target / "site"), *filter(None, [more.get("PYTHONPATH", "")])]
    return {**given, "LASTCALL_ENABLED": "1", **more, "PYTHONPATH": os.pathsep.join(path)}


def content(target: Path) -> dict[str, bytes]:
    return {str(path.relative_to(target)): path.read_bytes() for path in target.rglob("*") if path.is_file()}


# ---- what is copied ----------------------------------------------------------------------------------------


def test_it_is_the_whole_package_and_nothing_that_is_compiled(copied: Path) -> None:
    source = ROOT / "src" / "lastcall"
    there = {
        str(path.relative_to(copied / "lib" / "lastcall"))
        for path in (copied / "lib" / "lastcall").rglob("*")
        if path.is_file()
    }
    assert there == {
        str(path.relative_to(source)) for path in source.rglob("*") if path.suffix in (".py", ".typed")
    }
    assert not [path for path in copied.rglob("*") if path.suffix in (".so", ".pyc", ".pyd")]


def test_copying_again_changes_nothing(tmp_path: Path) -> None:
    package_volume.copy(tmp_path)
    before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
    package_volume.copy(tmp_path)
    assert {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_everybody_may_read_it_whatever_the_umask(tmp_path: Path) -> None:
    script = (
        "import os; os.umask(0o077); from pathlib import Path; from lastcall.kube.inject import "
        "package_volume; "
        f"package_volume.copy(Path({str(tmp_path)!r}))"
    )
    subprocess.run([sys.executable, "-c", script], env=environment(), check=True, timeout=PATIENCE)
    for path in (tmp_path / "lib").resolve().rglob("*"):
        mode = stat.S_IMODE(path.lstat().st_mode)
        assert mode == (0o755 if path.is_dir() else 0o644), path


def test_another_version_takes_its_place_in_one_step(tmp_path: Path) -> None:
    old = tmp_path / "0.0.9-abc" / "lastcall" / "auto" / "site"
    old.mkdir(parents=True)
    (tmp_path / "site").symlink_to("0.0.9-abc/lastcall/auto/site")
    package_volume.copy(tmp_path)
    # who reads the old one meanwhile goes on
    assert (tmp_path / "site" / "sitecustomize.py").is_file() and old.is_dir()
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_one_that_was_killed_while_it_copied_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / ".building-abc" / "lastcall").mkdir(parents=True)
    package_volume.copy(tmp_path)
    assert (tmp_path / "site" / "sitecustomize.py").is_file()


def test_many_at_once_leave_one_tree(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lastcall", "kube", "copy", str(tmp_path)]
    children = [subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE) for _ in range(3)]
    for child in children:
        _, said = child.communicate(timeout=PATIENCE)
        assert (child.returncode, said) == (0, b"")
    assert sorted(os.listdir(tmp_path)) == sorted(["lib", "site", os.readlink(tmp_path / "lib")])


def test_a_folder_that_cannot_be_written_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(errors.LastcallError, match="cannot be written: .*emptyDir"):
        package_volume.copy(tmp_path / "file")


# ---- in an image without lastcall --------------------------------------------------------------------------


def test_a_python_without_lastcall_is_switched_on_by_it(bare: Path, copied: Path) -> None:
    done = run(bare, PROBE, env=on(copied))
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["finders"] == 1 and json.loads(done.stdout)["path"] == []
    assert run(bare, "-c", WHERE, env=on(copied)).stdout.strip() == str(
        (copied / "lib").resolve() / "lastcall" / "__init__.py"
    )


def test_it_can_be_moved_as_a_mount_moves_it(bare: Path, copied: Path, tmp_path: Path) -> None:
    shutil.copytree(copied, tmp_path / "elsewhere", symlinks=True)
    assert run(bare, "-c", WHERE, env=on(tmp_path / "elsewhere")).stdout.startswith(
        str(tmp_path / "elsewhere")
    )


@pytest.mark.parametrize("word", ["", "0"])
def test_nothing_happens_where_it_is_not_asked_for(bare: Path, copied: Path, word: str) -> None:
    done = run(bare, "-c", WHERE, env={**on(copied), "LASTCALL_ENABLED": word})
    assert (done.stdout, done.stderr) == ("None\n", "")


def test_a_lastcall_of_the_image_wins(bare: Path, copied: Path, tmp_path: Path) -> None:
    shutil.copytree(
        ROOT / "src" / "lastcall",
        tmp_path / "image" / "lastcall",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    done = run(bare, "-c", WHERE, env=on(copied, PYTHONPATH=str(tmp_path / "image")))
    assert done.stdout.startswith(str(tmp_path / "image"))


def test_the_images_own_sitecustomize_runs_too(bare: Path, copied: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('mine')\n")
    done = run(bare, "-c", WHERE, env=on(copied, PYTHONPATH=str(tmp_path)))
    assert done.stdout.splitlines() == ["mine", str((copied / "lib").resolve() / "lastcall" / "__init__.py")]


def for_anybody() -> str | None:
    """A Python that another user than root can start, too."""
    for name in (interpreters.BASE, "/usr/bin/python3"):
        if all(folder.stat().st_mode & 0o001 for folder in Path(name).resolve().parents) and os.path.exists(
            name
        ):
            done = run(name, "-c", "import sys; print(sys.version_info >= (3, 11))", env=outside())
            if done.stdout == "True\n":
                return name
    return None


def test_it_is_usable_where_nothing_can_be_written(copied: Path) -> None:
    python = for_anybody()
    if os.geteuid() == 0 and (shutil.which("setpriv") is None or python is None):
        pytest.skip("another user cannot be become here, or has no Python")
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are for one user only
        os.chmod(folder, 0o755)
        mount = Path(folder, "mount")
        shutil.copytree(copied, mount, symlinks=True)
        for path in [*mount.rglob("*"), mount]:
            if not path.is_symlink():
                path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o222)
        before = content(mount)
        env = {name: value for name, value in on(mount).items() if name != "PYTHONDONTWRITEBYTECODE"}
        command = [
            python or interpreters.BASE,
            "-c",
            "import lastcall.settings; print(lastcall.settings.JITCheckpointConfig().enabled)",
        ]
        if os.geteuid() == 0:  # root writes where it likes: so somebody else does this
            command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *command]
        done = subprocess.run(
            command, env=env, cwd="/", capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        assert (done.stdout, done.stderr, done.returncode) == ("True\n", "", 0)
        assert content(mount) == before
        for path in [mount, *mount.rglob("*")]:
            if not path.is_symlink():
                path.chmod(0o755)


def test_the_core_works_without_compiled_packages(bare: Path, copied: Path) -> None:
    """No xxhash: digests of the standard library, and a checkpoint of the other kind is said to be unreadable
    here, not damaged."""
    script = """
import lastcall, sys
from lastcall.core.engine import digest
from lastcall import errors
assert "xxhash" not in sys.modules
print(digest.ALGORITHM)
try:
    digest.named("xxh3-128")
except errors.UncheckedError as error:
    print(error)
"""
    done = run(bare, "-c", script, env=on(copied))
    assert done.stdout.splitlines() == [
        "blake2b-128",
        "digests of the kind 'xxh3-128' cannot be checked here: the xxhash package is missing. Install it "
        "with: pip install xxhash",
    ], done.stderr


# ---- under an older Python ---------------------------------------------------------------------------------

OLDER = """
import os, sys
sys.version_info = (3, 8, 0, "final", 0)
sys.path.insert(0, sys.argv[1])
import sitecustomize
print([name for name in sys.modules if name.startswith("lastcall")], sitecustomize.__file__)
"""


def test_an_older_python_does_not_notice_it(bare: Path, copied: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("")
    env = {**outside(LASTCALL_ENABLED="1"), "PYTHONPATH": str(tmp_path)}
    script = f"import sys; sys.modules.pop('sitecustomize', None)\n{OLDER}"
    done = run(bare, "-c", script, copied / "site", env=env)
    assert (done.stdout, done.stderr) == (f"[] {tmp_path / 'sitecustomize.py'}\n", "")


def test_what_every_python_reads_has_no_syntax_of_a_newer_one(copied: Path) -> None:
    source = (copied / "site" / "sitecustomize.py").read_text()
    ast.parse(source, feature_version=(3, 4))
    assert source.isascii()  # Python 2 reads no other without being told how
    kinds = {type(node).__name__ for node in ast.walk(ast.parse(source))}
    newer = {
        "JoinedStr",
        "AnnAssign",
        "NamedExpr",
        "Nonlocal",
        "AsyncFunctionDef",
        "Await",
        "YieldFrom",
        "Match",
        "Starred",
        "TryStar",
    }
    assert not kinds & newer
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    assert functions and not [node for node in functions if node.args.kwonlyargs or node.returns]


# ---- the hook ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("grace", "seconds"), [("120", 120), ("", 30), ("2.5", 2.5)])
def test_the_hook_writes_what_a_stop_file_says(tmp_path: Path, grace: str, seconds: float) -> None:
    path = tmp_path / "a stop"
    env = {"LASTCALL_STOP_FILE": str(path), "PATH": os.defpath, "LASTCALL_GRACE_SECONDS": grace}
    subprocess.run(package_volume.PRE_STOP, env=env, check=True, timeout=PATIENCE)
    assert json.loads(path.read_text()) == {"grace": seconds, "reason": "preStop"}


def test_each_container_has_a_stop_file_of_its_own() -> None:
    assert package_volume.stop_file("a") == "/opt/lastcall/stop-a" != package_volume.stop_file("b")
    assert package_volume.SITE == "/opt/lastcall/site"
