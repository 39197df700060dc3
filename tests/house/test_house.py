"""tools/house.py: each check finds what it must in a small tree, and a count over its limit fails."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def house() -> Any:
    spec = importlib.util.spec_from_file_location("house", ROOT / "tools/house.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tree(root: Path, **files: str) -> Path:
    """A checkout: `core__session="..."` is src/lastcall/core/session.py, `guide_md` is docs/guide.md."""
    (root / "docs").mkdir()
    for name, text in files.items():
        document = name.endswith("_md")
        path = (
            root / f"docs/{name.removesuffix('_md')}.md"
            if document
            else root / f"src/lastcall/{name.replace('__', '/')}.py"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_fullest_folder_is_counted_without_its_init(tmp_path: Path, house: Any) -> None:
    root = tree(tmp_path, **{f"core__m{number}": "" for number in range(11)}, cli__main="")
    (root / "src/lastcall/core/__init__.py").write_text("")
    found = house.count(root)["modules"]
    assert (found.now, found.summary) == (11, ["lastcall/core 11"])
    assert [place.split() for place in found.places] == [["11", "lastcall/core"], ["1", "lastcall/cli"]]


def test_a_file_is_long_from_501_lines(tmp_path: Path, house: Any) -> None:
    found = house.count(tree(tmp_path, fits="x = 1\n" * 500, long="x = 1\n" * 501))["files"]
    assert (found.now, found.places) == (1, ["src/lastcall/long.py:1 501 lines"])


@pytest.mark.parametrize("start", ["def f():", "async def f():"])
def test_a_function_is_long_from_61_lines_its_decorators_left_out(
    tmp_path: Path, house: Any, start: str
) -> None:
    fits, long = (f"@one\n@two\n{start}\n" + "    x = 1\n" * lines for lines in (59, 60))
    found = house.count(tree(tmp_path, fits=fits, long=long))["functions"]
    assert (found.now, found.places) == (1, ["src/lastcall/long.py:3 f 61 lines"])


def test_a_method_is_a_function(tmp_path: Path, house: Any) -> None:
    found = house.count(tree(tmp_path, a="class C:\n    def f(self):\n" + "        x = 1\n" * 60))[
        "functions"
    ]
    assert found.summary == ["a.py f 61"]


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("session.clock.now()", 1),
        ("self.session.clock.now()", 1),
        ("self._session.clock.now()", 1),
        ("run.inner._session.clock.now()", 1),
        ("session.clock.source.now()", 1),
        ("session.outcome.kind = session.clock.time", 2),
        ("session.notify()", 0),
        ("session.notify().kind", 0),
        ("context.clock.now()", 0),
        ("'session.clock.now'", 0),
    ],
)
def test_two_levels_of_a_session_are_counted(tmp_path: Path, house: Any, line: str, count: int) -> None:
    assert house.count(tree(tmp_path, core__joint=f"{line}\n"))["session"].now == count


def test_the_session_may_look_into_itself(tmp_path: Path, house: Any) -> None:
    line = "session.clock.now()\n"
    found = house.count(tree(tmp_path, core__session=line, cli__session=line * 2))["session"]
    assert found.summary == ["cli/session.py 2"]
    assert found.places[0] == "src/lastcall/cli/session.py:1 session.clock.now"


def test_a_class_name_may_stand_in_one_module_only(tmp_path: Path, house: Any) -> None:
    twice = "class Only: ...\nclass Only: ...\n"
    found = house.count(tree(tmp_path, a="class Part: ...\n", core__b=f"class _Part: ...\n{twice}"))[
        "classes"
    ]
    assert (found.now, found.summary) == (1, ["Part (a, core/b)"])
    assert found.places == ["src/lastcall/a.py:1 Part", "src/lastcall/core/b.py:1 _Part"]


def test_a_unit_test_stands_in_the_folder_of_its_module_and_names_it(tmp_path: Path, house: Any) -> None:
    root = tree(tmp_path, events="", core__session="", core__session_end="", core__save__saver="")
    for name in ("test_events", "core/test_session_end", "core/test_save", "core/test_saver", "test_gone"):
        path = root / f"tests/unit/{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    found = house.count(root)
    strays = ["tests/unit/core/test_save.py", "tests/unit/core/test_saver.py", "tests/unit/test_gone.py"]
    assert found["strays"].places == strays
    assert found["untested"].places == ["src/lastcall/core/save/saver.py", "src/lastcall/core/session.py"]
    (root / "tests/unit/core/test_session_of_many_ranks.py").write_text("")
    found = house.count(root)
    assert (found["strays"].now, found["untested"].summary) == (3, ["core/save 1"])


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ('x = "It goes on."\n', [1]),
        ('x = f"{y} goes on"\n', [1]),
        ('x = ("It goes "\n     "on")\n', [1]),
        ('def f():\n    """Waits.\n\n    It goes on."""\n', [4]),
        ("x = 1  # Goes on\n", [1]),
        ("# It goes\n# on.\n", [1]),
        ("x = 1\n\n# one\n# It goes on.\nx = 2  # It goes on.\n", [4, 5]),
        ("x = 1  # It goes\n# on.\n", []),
        ('x = "cargoes on deck, goes only"\n', []),
        ("goes = on = 1\n", []),
    ],
)
def test_words_are_found_in_strings_and_comments(
    tmp_path: Path, house: Any, text: str, lines: list[int]
) -> None:
    found = house.count(tree(tmp_path, a=text))["goes on"]
    assert [place.split()[0] for place in found.places] == [f"src/lastcall/a.py:{line}" for line in lines]


def test_words_are_found_in_the_documents_outside_code_blocks(tmp_path: Path, house: Any) -> None:
    code = "    goes on\n\n    goes on\n\n```console\ngoes on\n```\n"
    root = tree(tmp_path, a="", guide_md=f"# It goes\non\n\n{code}- a point\n    that goes on\n")
    (root / "README.md").write_text("    goes on\n\nIt GOES ON.\n")
    places = [place.split()[0] for place in house.count(root)["goes on"].places]
    assert places == ["README.md:3", "docs/guide.md:1", "docs/guide.md:12"]


def test_every_word_is_found(tmp_path: Path, house: Any) -> None:
    found = house.count(tree(tmp_path, a="".join(f"# {word}\n" for word in house.WORDS)))
    assert {word: found[word].now for word in house.WORDS} == dict.fromkeys(house.WORDS, 1)
    assert len(house.WORDS) == 12


def test_a_count_over_its_limit_fails_and_says_what_to_do(
    tmp_path: Path, house: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    limit = house.LIMITS["modules"].limit
    root = tree(tmp_path, **{f"core__m{number}": "" for number in range(limit)})
    assert house.main(["--root", str(root)]) == 0
    assert "over the limit" not in capsys.readouterr().out
    (root / "src/lastcall/core/more.py").write_text("")
    assert house.main(["--root", str(root)]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert f"modules: {limit + 1} is over the limit of {limit}. {house.LIMITS['modules'].remedy}" in said


def test_a_limit_that_can_fall_is_named(
    tmp_path: Path, house: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert house.main(["--root", str(tree(tmp_path, a="# goes on\n"))]) == 0
    assert '"goes on" to 1' in " ".join(capsys.readouterr().out.split())


def test_list_prints_every_place(tmp_path: Path, house: Any, capsys: pytest.CaptureFixture[str]) -> None:
    root = tree(tmp_path, a="# It goes on anew.\n")
    assert house.main(["--root", str(root), "--list", "anew"]) == 0
    assert capsys.readouterr().out == "src/lastcall/a.py:1 It goes on anew.\n"
    assert house.main(["--root", str(root), "--list", "words"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_a_folder_without_the_package_is_refused(
    tmp_path: Path, house: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        house.main(["--root", str(tmp_path)])
    assert f"{tmp_path} has no src/lastcall" in capsys.readouterr().err


def test_the_repository_passes_and_its_table_fits_80_columns(
    house: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = house.main([]), capsys.readouterr().out
    assert code == 0, said
    assert not [line for line in said.splitlines() if len(line) > 80]
