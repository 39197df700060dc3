"""The bootstrap in real interpreters: it comes with `lastcall run` and with LASTCALL_ENABLED; what is the
program's own stays so."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipapp
from pathlib import Path
from typing import Any

import pytest

from helpers.processes import forkserver as nursery
from helpers.processes import interpreters
from helpers.processes.interpreters import below, outside, run
from lastcall.auto import bootstrap, environment

PROBE = Path(__file__).parent / "scripts" / "auto_probe.py"
LOADED = ["lastcall", "lastcall.auto", "lastcall.auto.bootstrap", "lastcall.auto.imports"]
# torch imports its own rendezvous, which is patched
PATCHED = [
    "lastcall.auto.attempts",
    "lastcall.core",
    "lastcall.core.process",
    "lastcall.core.process.patching",
]
WITH_TORCH = sorted([*LOADED, *PATCHED])
ACTIVE = {"finders": 1, "modules": LOADED, "path": []}
INERT = {"finders": 0, "modules": [], "path": []}
OFF = ["", "0", "false", "No", " off "]


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter of an environment in which lastcall is not installed."""
    return interpreters.venv(tmp_path_factory.mktemp("bare") / "venv")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    options = [
        "--no-deps",
        "--no-build-isolation",
        "--disable-pip-version-check",
        "-q",
        "-w",
        str(folder),
        str(nursery.ROOT),
    ]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options], check=True, timeout=nursery.PATIENCE)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture
def installed(wheel: Path, tmp_path: Path) -> Path:
    """An interpreter of an environment in which nothing but lastcall is installed, as pip does it."""
    python = interpreters.venv(tmp_path / "installed")
    options = [
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--disable-pip-version-check",
        "--no-compile",
        str(wheel),
    ]
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), *options], check=True, timeout=nursery.PATIENCE
    )
    return python


def probe(python: Path | str, *arguments: object, env: dict[str, str], **more: Any) -> dict[str, Any]:
    done = run(python, *(arguments or (PROBE,)), env=env, **more)
    assert (done.returncode, done.stderr) == (0, "")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def same(python: Path | str, *arguments: object, **more: str) -> tuple[int, str, str]:
    """Ends the same way and says the same below lastcall and without it; how."""
    one = run(python, *arguments, env=outside(**more))
    other = run(python, *arguments, env=below(**more))
    assert (other.returncode, other.stdout, other.stderr) == (one.returncode, one.stdout, one.stderr)
    return one.returncode, one.stdout, one.stderr


# ---- below `lastcall run` ----------------------------------------------------------------------------------


def test_below_lastcall_run_a_python_without_lastcall_waits_for_the_frameworks(bare: Path) -> None:
    assert probe(bare, env=below()) == ACTIVE
    assert probe(bare, env=outside()) == INERT


def test_lastcall_can_be_imported_there_and_nothing_else_of_where_it_comes_from(bare: Path) -> None:
    source = (
        "import lastcall.settings, importlib.util; print(lastcall.__file__, [importlib.util.find_spec(n) for "
        "n in ('torch', 'pytest')])"
    )
    done = run(bare, "-c", source, env=below())
    assert done.stdout == f"{nursery.ROOT / 'src/lastcall/__init__.py'} [None, None]\n"


def test_an_environment_with_a_lastcall_of_its_own_uses_that_and_both_ways_in_are_one(
    installed: Path,
) -> None:
    assert probe(installed, env=below()) == ACTIVE
    done = run(installed, "-c", "import lastcall; print(lastcall.__file__)", env=below())
    assert Path(done.stdout.strip()).is_relative_to(interpreters.packages(installed))


def test_a_folder_of_that_name_on_the_path_is_not_taken_for_the_package(bare: Path, tmp_path: Path) -> None:
    (tmp_path / "lastcall").mkdir()  # somebody's checkpoints
    assert probe(bare, env=below(PYTHONPATH=str(tmp_path))) == ACTIVE


@pytest.mark.parametrize("word", OFF)
def test_switched_off_nothing_is_loaded_and_the_users_own_file_still_runs(
    bare: Path, tmp_path: Path, word: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.mine = True\n")
    env = below(PYTHONPATH=str(tmp_path)) | {"LASTCALL_ENABLED": word}
    assert environment.SITE in env["PYTHONPATH"]
    assert probe(bare, env=env) == INERT
    assert run(bare, "-c", "import sys; print(sys.mine)", env=env).stdout == "True\n"


def test_a_word_that_is_neither_yes_nor_no_is_one_warning(installed: Path) -> None:
    done = run(installed, PROBE, env=below(LASTCALL_ENABLED="maybe"))
    assert json.loads(done.stdout)["finders"] == 0
    assert done.stderr == (
        "lastcall: LASTCALL_ENABLED='maybe' is neither yes nor no, so it counts as no. Set it to 1 or 0: "
        "export LASTCALL_ENABLED=1\n"
    )


@pytest.mark.parametrize("word", ["1", "TRUE", " on "])
def test_rays_own_variable_is_enough_and_it_is_about_ray_alone(installed: Path, word: str) -> None:
    env = outside(RAY_TRAIN_JIT_CHECKPOINT_ENABLED=word)
    assert probe(installed, env=env) == ACTIVE
    waiting = "import sys; print([n for f in sys.meta_path for n in getattr(f, '_table', ())])"
    assert run(installed, "-c", waiting, env=env).stdout == f"{sorted(bootstrap.RAY)}\n"


@pytest.mark.parametrize("words", [("0", "1"), ("", "0"), ("", "off"), ("no", "")])
def test_switched_off_by_our_own_variable_rays_does_not_switch_it_on(
    installed: Path, words: tuple[str, str]
) -> None:
    env = outside(LASTCALL_ENABLED=words[0], RAY_TRAIN_JIT_CHECKPOINT_ENABLED=words[1])
    assert probe(installed, env=env)["finders"] == 0


# ---- what the user has of that kind ------------------------------------------------------------------------


def test_the_path_of_the_program_is_what_it_is_without_us(bare: Path, tmp_path: Path) -> None:
    code, out, _ = same(bare, "-c", "import sys; print(sys.path)", PYTHONPATH=f"{tmp_path}:/nowhere")
    assert code == 0 and str(tmp_path) in out


def test_the_users_sitecustomize_runs_in_its_own_name(bare: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "print('mine', __file__, __name__, __spec__.origin, type(__loader__).__name__)\n"
    )
    source = (
        "import sitecustomize as s, sys; print(s.__file__, s.__spec__.origin, sys.modules['sitecustomize'] "
        "is s)"
    )
    _, out, _ = same(bare, "-c", source, PYTHONPATH=str(tmp_path))
    file = tmp_path / "sitecustomize.py"
    assert out == f"mine {file} sitecustomize {file} SourceFileLoader\n{file} {file} True\n"


def test_a_package_as_sitecustomize_works_too(bare: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize").mkdir()
    (tmp_path / "sitecustomize" / "__init__.py").write_text("from sitecustomize import inner\n")
    (tmp_path / "sitecustomize" / "inner.py").write_text("print('inner')\n")
    assert same(bare, "-c", "pass", PYTHONPATH=str(tmp_path)) == (0, "inner\n", "")


def test_without_one_there_is_none(bare: Path) -> None:
    code, _, err = same(bare, "-c", "import sitecustomize")
    assert code == 1 and "No module named 'sitecustomize'" in err


@pytest.mark.parametrize(
    "source", ["1 / 0", "import nowhere_to_be_found", "def", "raise ImportError('x', name='sitecustomize')"]
)
def test_a_sitecustomize_that_fails_fails_as_it_does_without_us(
    bare: Path, tmp_path: Path, source: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(source + "\n")
    code, out, _ = same(bare, "-c", "print('on')", PYTHONPATH=str(tmp_path))
    assert (code, out) == (0, "on\n")


def test_a_sitecustomize_that_ends_the_program_ends_it(bare: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("raise SystemExit(3)\n")
    one, other = (
        run(bare, "-c", "print('on')", env=env(PYTHONPATH=str(tmp_path))) for env in (outside, below)
    )
    assert (one.returncode, one.stdout) == (other.returncode, other.stdout) == (1, "")
    assert one.stderr.splitlines()[0] == other.stderr.splitlines()[0]
    assert one.stderr.splitlines()[-1] == other.stderr.splitlines()[-1] == "SystemExit: 3"


def test_a_usercustomize_runs(tmp_path: Path) -> None:
    (tmp_path / "usercustomize.py").write_text("print('user')\n")
    same(interpreters.BASE, "-c", "print('on')", PYTHONPATH=str(tmp_path), PYTHONUSERBASE=str(tmp_path))
    env = below(PYTHONPATH=str(tmp_path), PYTHONUSERBASE=str(tmp_path))
    assert (
        run(interpreters.BASE, "-c", "import site; print(site.ENABLE_USER_SITE)", env=env).stdout
        == "user\nTrue\n"
    )


# ---- ways to start Python ----------------------------------------------------------------------------------


def test_every_way_to_start_a_program_is_covered(bare: Path, tmp_path: Path) -> None:
    app = tmp_path / "app"
    app.mkdir()
    shutil.copy(PROBE, app / "__main__.py")
    zipapp.create_archive(app, tmp_path / "app.pyz")
    for arguments in (
        [PROBE],
        ["-P", PROBE],
        ["-m", "auto_probe"],
        [app],
        [tmp_path / "app.pyz"],
        ["-X", "dev", PROBE],
    ):
        assert probe(bare, *arguments, env=below(), cwd=PROBE.parent) == ACTIVE, arguments
    assert probe(bare, "-", env=below(), input=PROBE.read_text()) == ACTIVE
    assert probe(bare, PROBE, env=below(PYTHONSAFEPATH="1")) == ACTIVE
    assert probe(bare, "-W", "error", PROBE, env=below()) == ACTIVE


@pytest.mark.parametrize("flag", ["-S", "-I", "-E"])
def test_a_python_that_was_told_not_to_look_is_left_alone(bare: Path, flag: str) -> None:
    # with -S the folder is on the path, and nobody looks into it
    assert probe(bare, flag, PROBE, env=below()) == {
        **INERT,
        "path": [environment.SITE] if flag == "-S" else [],
    }


@pytest.mark.parametrize(
    ("way", "expected"), [("fork", ACTIVE), ("spawn", ACTIVE), ("forkserver", ACTIVE), ("cleaned", INERT)]
)
def test_children_have_it_too_unless_their_environment_was_cleaned(
    bare: Path, way: str, expected: dict[str, object]
) -> None:
    assert probe(bare, PROBE, way, env=below()) == expected


@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_in_the_workers_of_a_loader_nothing_happens(way: str) -> None:
    script = PROBE.with_name("auto_loader.py")
    without, below_us = (run(sys.executable, script, way, env=env) for env in (outside(), below()))
    one, other = (json.loads(done.stdout.splitlines()[0]) for done in (without, below_us))
    assert (one.pop("modules"), other.pop("modules")) == ([], WITH_TORCH)
    assert one == other and "lastcall" not in below_us.stderr  # torch itself may say something there, or not


def test_any_other_python_of_this_machine_behaves_as_ever(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('mine')\n")
    found = [
        *Path("/usr/bin").glob("python[23]"),
        *Path.home().glob(".pyenv/versions/*/bin/python"),
        Path(sys.executable),
    ]
    for python in found:
        code, out, err = same(
            python, "-c", "import sys; print(sys.path); print('%d' % len(sys.argv))", PYTHONPATH=str(tmp_path)
        )
        assert (code, err) == (0, "") and out.startswith("mine\n"), python


# ---- failures of ours --------------------------------------------------------------------------------------


def test_a_bootstrap_that_is_gone_is_one_warning_and_the_program_runs(bare: Path, tmp_path: Path) -> None:
    site = tmp_path / "lastcall" / "auto" / "site"
    shutil.copytree(environment.SITE, site)
    (tmp_path / "sitecustomize.py").write_text("print('mine')\n")
    env = outside(LASTCALL_ENABLED="1", PYTHONPATH=f"{site}:{tmp_path}")
    done = run(bare, "-c", "print('on')", env=env)
    assert (done.returncode, done.stdout) == (0, "mine\non\n")
    assert done.stderr.startswith("lastcall: not enabled in this process: ") and done.stderr.count("\n") == 1
    shutil.rmtree(site)
    done = run(bare, "-c", "print('on')", env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, "mine\non\n", "")


def test_a_failure_with_no_stderr_to_tell_it_is_dropped(bare: Path, tmp_path: Path) -> None:
    site = tmp_path / "lastcall" / "auto" / "site"
    shutil.copytree(environment.SITE, site)
    command = ["sh", "-c", f"exec {bare} -c 'print(1)' 2>&-"]
    env = outside(LASTCALL_ENABLED="1", PYTHONPATH=str(site))
    assert (
        subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True, timeout=nursery.PATIENCE).stdout
        == b"1\n"
    )


# ---- the installed package ---------------------------------------------------------------------------------


def test_with_the_wheel_installed_the_variable_alone_does_it(installed: Path) -> None:
    on = outside(LASTCALL_ENABLED="1")
    assert probe(installed, env=on) == ACTIVE
    assert probe(installed, "-E", PROBE, env=on) == INERT  # D10: an isolated Python is left alone
    assert probe(installed, "-S", PROBE, env=on) == INERT
    for way in ("fork", "spawn", "forkserver"):
        assert probe(installed, PROBE, way, env=on) == ACTIVE
    for env in (outside(), *(outside(LASTCALL_ENABLED=word) for word in OFF)):
        assert probe(installed, env=env) == INERT


def test_another_pth_file_has_its_say_before_and_after_ours(installed: Path) -> None:
    packages = interpreters.packages(installed)
    for name in ("a-first.pth", "z-last.pth"):
        (packages / name).write_text(f"import sys; sys.seen = getattr(sys, 'seen', '') + '{name} '\n")
    done = run(
        installed, "-c", "import sys; print(sys.seen, len(sys.meta_path))", env=outside(LASTCALL_ENABLED="1")
    )
    assert (done.stdout.split()[:2], done.stderr) == (["a-first.pth", "z-last.pth"], "")


def test_a_half_removed_package_says_nothing(installed: Path) -> None:
    for gone in ("auto/imports.py", "auto/bootstrap.py", "auto", "__init__.py", ""):
        path = interpreters.packages(installed) / "lastcall" / gone
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        done = run(installed, "-c", "print('on')", env=outside(LASTCALL_ENABLED="1"))
        assert (done.returncode, done.stdout, done.stderr) == (0, "on\n", ""), gone


def test_uninstalling_takes_everything_away(installed: Path) -> None:
    packages = interpreters.packages(installed)
    assert (packages / "lastcall-auto.pth").exists()
    pip = [sys.executable, "-m", "pip", "--python", str(installed), "--disable-pip-version-check"]
    subprocess.run([*pip, "uninstall", "-q", "-y", "lastcall"], check=True, timeout=nursery.PATIENCE)
    assert list(packages.rglob("*")) == []


def test_an_import_of_what_torchrun_is_made_of_is_patched(bare: Path, tmp_path: Path) -> None:
    api = tmp_path / "torch" / "distributed" / "elastic" / "multiprocessing" / "api.py"
    api.parent.mkdir(parents=True)
    api.write_text(
        "class PContext:\n    def close(self, death_sig=None, timeout=30):\n        print(timeout)\n"
    )
    source = "import torch.distributed.elastic.multiprocessing.api as a; a.PContext().close()"
    env = below(PYTHONPATH=str(tmp_path), LASTCALL_GRACE_SECONDS="60")
    assert run(bare, "-c", source, env=env).stdout == "65.0\n"
    assert run(bare, "-c", source, env=outside(PYTHONPATH=str(tmp_path))).stdout == "30\n"


def test_the_finder_leaves_when_all_that_it_waits_for_is_there_and_not_before(
    bare: Path, tmp_path: Path
) -> None:
    names = sorted({**bootstrap.PATCHES, **bootstrap.RAY})
    for name in names:
        file = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    source = (
        "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name); "
        "print(len(sys.meta_path))"
    )
    waiting, gone = (
        run(bare, "-c", source, *names, env=env(PYTHONPATH=str(tmp_path))) for env in (below, outside)
    )
    without = int(gone.stdout.split()[0])
    assert [int(count) for count in waiting.stdout.split()] == [without + 1] * (len(names) - 1) + [without]
    # Modules that look like nothing we know are left as they are, with a warning at most: the program goes
    # on.
    assert (waiting.returncode, gone.returncode, gone.stderr) == (0, 0, "")
    assert all(line.startswith("lastcall: ") for line in waiting.stderr.splitlines())
