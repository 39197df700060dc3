from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
import threading
import types
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from lastcall.auto import imports

HERE = "lc_patches"  # the module with our functions, made for each test
applied: list[types.ModuleType] = []


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules of a test are gone after it, and so are finders. Threads that other tests have left do not
    count."""
    modules, finders = set(sys.modules), list(sys.meta_path)
    frames = sys._current_frames  # pytest-xdist's own thread is none of threading's
    known = set(frames()) - {threading.main_thread().ident}
    monkeypatch.setattr(
        sys,
        "_current_frames",
        lambda: {thread: frame for thread, frame in frames().items() if thread not in known},
    )
    monkeypatch.syspath_prepend(tmp_path)
    # a module written anew within a second would be taken for the old one
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    patches = types.ModuleType(HERE)
    patches.apply = applied.append  # type: ignore[attr-defined]
    sys.modules[HERE] = patches
    yield
    applied.clear()
    sys.meta_path[:] = finders
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def write(folder: Path, name: str, source: str = "value = 1\n") -> None:
    path = folder.joinpath(*name.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    importlib.invalidate_caches()


def waiting(*names: str, function: str = f"{HERE}:apply") -> imports.Finder:
    """A finder that never runs out of modules to wait for, unless it is told otherwise."""
    finder = imports.Finder(dict.fromkeys(names, function))
    finder.install()
    return finder


def test_the_function_is_called_with_the_finished_module(tmp_path: Path) -> None:
    write(tmp_path, "lc_one")
    waiting("lc_one", "lc_never")
    import lc_one  # type: ignore[import-not-found]

    assert applied == [lc_one] and lc_one.value == 1


def test_the_module_looks_as_if_nobody_had_waited_for_it(tmp_path: Path) -> None:
    write(tmp_path, "lc_bare", "def f():\n    return 1\nseen = __loader__, __spec__.loader\n")
    bare = importlib.import_module("lc_bare")
    write(tmp_path, "lc_one", (tmp_path / "lc_bare.py").read_text())
    waiting("lc_one", "lc_never")
    module = importlib.import_module("lc_one")
    assert type(module.__loader__) is type(bare.__loader__) is importlib.machinery.SourceFileLoader
    assert module.__spec__ is not None and module.__spec__.loader is module.__loader__
    assert module.seen == (module.__loader__, module.__loader__)  # while it ran, too
    assert (module.__file__, module.__spec__.origin, module.__spec__.has_location) == (
        str(tmp_path / "lc_one.py"),
    ) * 2 + (True,)
    assert set(vars(module)) == set(vars(bare))
    assert inspect.getsource(module.f).startswith("def f")


def test_find_spec_alone_triggers_nothing_and_gives_what_looks_like_the_real_loader(tmp_path: Path) -> None:
    write(tmp_path, "lc_one")
    waiting("lc_one")
    spec = importlib.util.find_spec("lc_one")
    assert spec is not None and spec.loader is not None
    assert applied == [] and "lc_one" not in sys.modules
    assert isinstance(spec.loader, importlib.machinery.SourceFileLoader)
    assert spec.loader.get_source("lc_one") == "value = 1\n"
    assert spec.loader.path == str(tmp_path / "lc_one.py")
    assert not hasattr(spec.loader, "nonsense")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert applied == [module] and type(spec.loader) is importlib.machinery.SourceFileLoader


def test_a_module_that_does_not_exist_is_missing_as_ever() -> None:
    waiting("lc_missing")
    assert importlib.util.find_spec("lc_missing") is None
    with pytest.raises(ModuleNotFoundError, match="No module named 'lc_missing'"):
        importlib.import_module("lc_missing")
    assert applied == []


def test_a_module_that_fails_raises_its_own_error_and_is_waited_for_again(tmp_path: Path) -> None:
    write(tmp_path, "lc_one", "1 / 0\n")
    waiting("lc_one", "lc_never")
    with pytest.raises(ZeroDivisionError):
        importlib.import_module("lc_one")
    assert applied == [] and "lc_one" not in sys.modules
    write(tmp_path, "lc_one")
    module = importlib.import_module("lc_one")
    assert applied == [module]


def test_a_submodule_is_patched_and_its_package_is_not(tmp_path: Path) -> None:
    write(tmp_path, "lc_pack.__init__", "from lc_pack import inner\n")
    write(tmp_path, "lc_pack.inner")
    waiting("lc_pack.inner", "lc_never")
    package = importlib.import_module("lc_pack")
    assert applied == [package.inner]


def test_a_namespace_package_is_left_as_it_is(tmp_path: Path) -> None:
    write(tmp_path, "lc_space.inner")
    waiting("lc_space", "lc_space.inner")
    inner = importlib.import_module("lc_space.inner")
    assert applied == [inner]
    assert sys.modules["lc_space"].__file__ is None and list(sys.modules["lc_space"].__path__) == [
        str(tmp_path / "lc_space")
    ]


def test_a_reload_is_patched_again_while_others_are_waited_for(tmp_path: Path) -> None:
    write(tmp_path, "lc_one")
    waiting("lc_one", "lc_never")
    module = importlib.import_module("lc_one")
    write(tmp_path, "lc_one", "value = 2\n")
    assert importlib.reload(module) is module
    assert applied == [module, module] and module.value == 2
    assert type(module.__loader__) is importlib.machinery.SourceFileLoader


def test_the_finder_leaves_when_everything_is_done(tmp_path: Path) -> None:
    write(tmp_path, "lc_one")
    write(tmp_path, "lc_two")
    before = list(sys.meta_path)
    finder = waiting("lc_one", "lc_two")
    importlib.import_module("lc_two")
    assert sys.meta_path == [finder, *before]
    module = importlib.import_module("lc_one")
    assert sys.meta_path == before
    importlib.reload(module)
    assert len(applied) == 2


def test_the_finder_stays_while_other_threads_walk_the_path(tmp_path: Path) -> None:
    write(tmp_path, "lc_one")
    finder = waiting("lc_one")
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    importlib.import_module("lc_one")
    stop.set()
    thread.join()
    assert finder in sys.meta_path and len(applied) == 1
    assert importlib.util.find_spec("json") is not None


def test_a_module_that_is_there_already_is_patched_at_once(tmp_path: Path) -> None:
    write(tmp_path, "lc_one")
    module = importlib.import_module("lc_one")
    before = list(sys.meta_path)
    waiting("lc_one")
    assert applied == [module] and sys.meta_path == before


def test_a_module_in_the_middle_of_its_import_is_left_alone(tmp_path: Path) -> None:
    sys.modules["lc_start"] = types.ModuleType("lc_start")
    sys.modules["lc_start"].start = lambda: waiting("lc_one", "lc_never")  # type: ignore[attr-defined]
    write(tmp_path, "lc_one", "import lc_start\nlc_start.start()\n")
    importlib.import_module("lc_one")
    assert applied == []


def lazily(name: str) -> types.ModuleType:
    """As the documentation of importlib.util.LazyLoader does it."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_a_lazy_module_stays_lazy_and_is_patched_on_its_first_use(tmp_path: Path) -> None:
    write(tmp_path, "lc_one")
    waiting("lc_one", "lc_never")
    module = lazily("lc_one")
    assert applied == []
    assert module.value == 1
    assert applied == [module]
    assert type(module.__loader__) is importlib.machinery.SourceFileLoader


class LazyFinder(importlib.abc.MetaPathFinder):
    """Makes every module lazy, as `demandimport` does."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None and name.startswith("lc_"):
            spec.loader = importlib.util.LazyLoader(spec.loader)
        return spec


def test_a_module_that_another_finder_makes_lazy_stays_so(tmp_path: Path) -> None:
    write(tmp_path, "lc_one")
    sys.meta_path.insert(0, LazyFinder())
    waiting("lc_one", "lc_never")
    module = importlib.import_module("lc_one")
    assert applied == []
    assert module.value == 1
    assert applied == [module]


class AskingFinder(importlib.abc.MetaPathFinder):
    """Asks all finders for the spec, as other tools that wait for imports do; keeps itself from answering
    twice."""

    def __init__(self) -> None:
        self.busy = False
        self.asked = 0

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if self.busy:
            return None
        self.busy = True
        self.asked += 1
        try:
            return importlib.util.find_spec(name)
        finally:
            self.busy = False


@pytest.mark.parametrize("theirs_first", [False, True])
def test_another_tool_that_waits_for_imports_does_not_make_it_happen_twice(
    tmp_path: Path, theirs_first: bool
) -> None:
    write(tmp_path, "lc_one")
    asking = AskingFinder()
    sys.meta_path.insert(0, asking)
    waiting("lc_one", "lc_never")
    if theirs_first:
        sys.meta_path.remove(asking)
        sys.meta_path.insert(0, asking)
    module = importlib.import_module("lc_one")
    assert applied == [module]
    assert asking.asked >= 1


def test_a_finder_of_the_old_kind_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path, "lc_one")
    waiting("lc_one", "lc_never")
    old = object()
    sys.meta_path.append(old)  # type: ignore[arg-type]
    module = importlib.import_module("lc_one")
    assert applied == [module]


def test_a_module_in_a_zip_shares_its_loader_with_others_which_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.writestr("lc_one.py", "value = 1\n")
        archive.writestr("lc_two.py", "value = 2\n")
    monkeypatch.syspath_prepend(tmp_path / "app.zip")
    waiting("lc_one", "lc_never")
    one, two = importlib.import_module("lc_one"), importlib.import_module("lc_two")
    assert applied == [one]
    assert type(one.__loader__) is type(two.__loader__)


def test_a_module_that_puts_another_in_its_place_is_patched_in_that_one(tmp_path: Path) -> None:
    write(tmp_path, "lc_one", "import sys, types\nsys.modules[__name__] = types.ModuleType('stand_in')\n")
    waiting("lc_one", "lc_never")
    module = importlib.import_module("lc_one")
    assert module.__name__ == "stand_in" and applied == [module]


@pytest.mark.parametrize(
    "function", ["lc_patches:raises", "lc_patches:missing", "lc_nowhere:apply", "lc_patches"]
)
def test_a_failure_of_ours_is_one_warning_and_the_import_succeeds(
    tmp_path: Path, function: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def raises(module: types.ModuleType) -> None:
        raise ValueError("no such luck")

    sys.modules[HERE].raises = raises  # type: ignore[attr-defined]
    write(tmp_path, "lc_one")
    finder = waiting("lc_one", function=function)
    assert importlib.import_module("lc_one").value == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"lastcall: lc_one is left unpatched because {function} failed: ")
    assert finder not in sys.meta_path


def test_a_warning_with_nowhere_to_go_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    imports.warn("nobody hears this")


def test_many_threads_import_at_once_and_the_function_is_called_once_a_module(tmp_path: Path) -> None:
    names = [f"lc_many{number}" for number in range(8)]
    for name in names:
        write(tmp_path, name, "import time\ntime.sleep(0.01)\nvalue = 1\n")
    waiting(*names)
    start = threading.Barrier(16)
    failures: list[BaseException] = []

    def work(offset: int) -> None:
        start.wait()
        try:
            for number in range(len(names)):
                assert importlib.import_module(names[(number + offset) % len(names)]).value == 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(offset,)) for offset in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert sorted(module.__name__ for module in applied) == names
