"""docs/architecture.md says what the source says: phases, packages, rooms, modules, threads. It stays short
enough to be read."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from lastcall.core.notice import phases
from lastcall.core.notice.phases import Phase

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "lastcall"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    found = re.search(rf"^## {title}.*?\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"docs/architecture.md has no section '## {title}'"
    return found[1]


def block(text: str, kind: str = "text") -> list[str]:
    found = re.search(rf"^```{kind}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found, f"there is no ```{kind} block"
    return found[1].splitlines()


def children(folder: Path) -> set[str]:
    """Modules and packages in it, private ones left out."""
    modules = {path.stem for path in folder.glob("*.py")}
    return {
        name
        for name in modules | {path.parent.name for path in folder.glob("*/__init__.py")}
        if not name.startswith("_")
    }


# ---- phases ------------------------------------------------------------------------------------------------


def test_the_transitions_of_the_page_are_those_of_the_code() -> None:
    written = {}
    for line in block(section("The phases of a notice"), "transitions"):
        before, _, after = line.partition(" -> ")
        names = [] if after == "(end)" else after.split(", ")
        written[Phase[before]] = frozenset(Phase[name] for name in names)
        assert len(names) == len(set(names))
    assert written == phases.ALLOWED


def test_the_drawing_has_every_phase() -> None:
    drawing = "\n".join(block(section("The phases of a notice")))
    assert [phase.name for phase in Phase if not re.search(rf"\b{phase.name}\b", drawing)] == []


# ---- packages, rooms, modules ------------------------------------------------------------------------------


def contract(name: str) -> list[set[str]]:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (found,) = (one for one in contracts if one["name"].startswith(name))
    return [set(layer.replace("lastcall.", "").split(" | ")) for layer in found["layers"]]


def test_the_packages_are_those_of_the_source_in_the_order_of_the_contract() -> None:
    layers = []
    for line in block(section("Packages")):
        names = re.match(r"[a-z ]+?(?=:|  |$)", line)
        assert names, line
        layers.append(set(names[0].split()))
    assert layers == [layer - {"__main__"} for layer in contract("Layers")]
    public = set(re.findall(r"`(?:lastcall)?\.(\w+)`", section("Packages")))
    assert set().union(*layers) | public == children(SOURCE)


def test_the_rooms_are_those_of_core_in_the_order_of_the_contract() -> None:
    levels: list[set[str]] = []
    for line in block(section("Rooms of `core`")):
        indented, name, says = re.fullmatch(r"( ?)(\w+) +(\S.*)", line).groups()  # type: ignore[union-attr]
        assert 1 <= len(re.findall(r"\.(?: |$)", says)) <= 3, line
        if indented:
            levels[-1].add(name)
        else:
            levels.append({name})
    assert levels == contract("The rooms of core")
    assert set().union(*levels) == children(SOURCE / "core")


@pytest.mark.parametrize("page", ["architecture.md", "internals.md"])
def test_every_module_that_is_named_exists(page: str) -> None:
    named = set(re.findall(r"(?<![\w/])(?:\w+/)+\w+\.py\b", (ROOT / "docs" / page).read_text()))
    assert len(named) > 5
    assert [
        name for name in sorted(named) if not (SOURCE / name).is_file() and not (ROOT / name).is_file()
    ] == []


# ---- threads -----------------------------------------------------------------------------------------------


def threads(source: str) -> Iterator[str | None]:
    """The name of every thread that is made there, with * for what is put in; None for one without a name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("threading.Thread", "Thread"):
            yield next((named(word.value) for word in node.keywords if word.arg == "name"), None)


def named(value: ast.expr) -> str | None:
    if isinstance(value, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in value.values)
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


def test_the_threads_of_the_page_are_those_of_the_source() -> None:
    made = {name for path in SOURCE.rglob("*.py") for name in threads(path.read_text(encoding="utf-8"))}
    assert None not in made, "a thread without a name cannot be found in a stack dump"
    assert set(re.findall(r"lastcall-[\w*-]+", section("Threads"))) == made


def test_threads_are_found_however_they_are_named() -> None:
    source = (
        'Thread(name="a")\nthreading.Thread(target=f, '
        'name=f"b-{n}-c")\nthreading.Thread(target=f)\nProcess(name="d")\n'
    )
    assert list(threads(source)) == ["a", "b-*-c", None]


# ---- the page itself ---------------------------------------------------------------------------------------


def test_the_page_fits_on_two_screens() -> None:
    lines = PAGE.splitlines()
    assert len(lines) <= 125
    assert max(map(len, lines)) <= 120


def test_the_glossary_is_alphabetical_and_has_no_word_twice() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    words = re.findall(r"^\| ([a-z][a-z, ]+?) \| [A-Z`]", text, re.MULTILINE)
    assert len(words) >= 30
    assert words == sorted(set(words))


def test_every_place_that_contributing_names_exists() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("## Where does a change go")[2].partition("\n## ")[0]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 15
    for row in rows:
        named = re.findall(r"`([\w/.]+)", row[-1])
        assert named, row
        assert [name for name in named if not (SOURCE / name).exists() and not (ROOT / name).exists()] == []


def test_every_make_target_that_contributing_names_exists() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([\w-]+)", text)) - {"builds"} <= targets
