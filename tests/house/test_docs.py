"""The pages: every block is run or says why not, links lead somewhere, generated pages are up to date, the
symptoms have their tests, and nothing pretends to be on a package index."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import json
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from bench import readme

import lastcall
from helpers.docs import blocks as doc_blocks
from helpers.docs.blocks import PAGES, Block
from helpers.processes.forkserver import ROOT
from lastcall.cli import main as cli
from lastcall.cli import parser as parsers

BLOCKS = [block for page in PAGES for block in doc_blocks.blocks(page)]
TRACKED = [
    ROOT / name
    for name in subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split("\0")
    if name and (ROOT / name).is_file()
]


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look for their module there
    spec.loader.exec_module(module)
    return module


def named_test(name: str) -> bool:
    """Whether this file, folder or function of the tests exists."""
    file, _, function = name.partition("::")
    path = ROOT / file
    if not function:
        return path.exists()
    if not path.is_file():
        return False
    defined = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))
    return function in {node.name for node in defined}


# ---- blocks ------------------------------------------------------------------------------------------------


def test_every_block_is_run_or_says_why_not() -> None:
    assert [block.where for block in BLOCKS if not block.mark] == []
    assert [block.where for block in BLOCKS if block.mark == "not run" and len(block.value.split()) < 3] == []


def test_the_tests_that_run_blocks_exist() -> None:
    missing = {
        (block.where, block.value) for block in BLOCKS if block.mark == "runs" and not named_test(block.value)
    }
    assert missing == set()


def command_lines(block: Block) -> Iterator[list[str]]:
    """Commands of lastcall in a block: with or without variables before them, up to a pipe."""
    for line in block.commands.splitlines():
        try:
            words = shlex.split(line.removeprefix("#SBATCH"), comments=True)
        except ValueError:  # a line of something else, or one that goes on
            continue
        for end, word in enumerate(words):
            if word in ("|", "&", ";", "&&", ">") or word.endswith(";"):
                words = (
                    [*words[:end], word.rstrip(";")] if word.endswith(";") and len(word) > 1 else words[:end]
                )
                break
        while words and re.fullmatch(r"\w+=.*|exec|srun|--[\w-]+=\S+", words[0]):
            words = words[1:]
        if words and words[0] == "lastcall" and not {"COMMAND...", "[options]"} & set(words):
            yield words[1:]


COMMANDS = [
    (block.where, words)
    for block in BLOCKS
    if block.language in ("", "bash", "text") and block.mark != "output"
    for words in command_lines(block)
]


def test_commands_are_found() -> None:
    assert len(COMMANDS) > 25


@pytest.mark.parametrize(
    ("where", "words"), COMMANDS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_command_of_the_pages_has_options_that_exist(where: str, words: list[str]) -> None:
    if words == ["--version"]:
        return
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            parsers.build(words[:1]).parse_args(cli.joined(words))
        except SystemExit:
            pytest.fail(f"{where}: lastcall {shlex.join(words)}: {said.getvalue()}")


def test_python_blocks_are_python() -> None:
    for block in BLOCKS:
        if block.language == "python":
            compile(textwrap.dedent(block.text), block.where, "exec")


def test_json_blocks_are_json() -> None:
    for block in BLOCKS:
        if block.language == "json":
            json.loads(block.text)


def test_variables_that_the_pages_name_are_in_the_source() -> None:
    known = set()
    for path in [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]:
        known |= set(re.findall(r"\bLASTCALL_[A-Z0-9_]*[A-Z0-9]\b", path.read_text()))
    for page in [*PAGES, *(ROOT / "docs" / "reference").glob("*.md")]:
        named = set(re.findall(r"\bLASTCALL_[A-Z0-9_]*[A-Z0-9]\b(?!\*)", page.read_text()))
        assert named - known == set(), page


# ---- links -------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize(
    "page",
    [*PAGES, *sorted((ROOT / "docs/reference").glob("*.md")), ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"],
    ids=lambda page: page.name,
)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|srcset|href)="([^"]+)"', text)
    for target in targets:
        if re.match(r"https?:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page.name} links to {target}"
        assert not anchor or path.suffix != ".md" or anchor in anchors(path), f"{page.name} links to {target}"


# ---- generated ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["reference", "timeline"])
def test_what_is_generated_is_up_to_date(name: str) -> None:
    assert tool(name).main(["--check"]) == 0


def test_the_numbers_of_the_readme_are_those_of_the_measured_table() -> None:
    assert readme.measured(readme.README) == readme.headlines(readme.measured(readme.PAGE))


def test_every_public_method_and_field_has_a_docstring_and_a_place_in_the_reference() -> None:
    reference = tool("reference")
    page = (ROOT / "docs/reference/api.md").read_text()
    for _, module, name in reference.API:
        assert f"::: {module}.{name}\n" in page
    for module, name in (
        ("lastcall.adapters.torch.run", "Run"),
        ("lastcall.settings.configurations", "JITCheckpointConfig"),
    ):
        assert all(f"        - {each}\n" in page for each in reference.members(module, name))
    undocumented = [
        name
        for name, value in vars(lastcall.Run).items()
        if not name.startswith("_") and (callable(value) or isinstance(value, property)) and not value.__doc__
    ]
    assert undocumented == []


# ---- symptoms ----------------------------------------------------------------------------------------------


def test_each_of_the_twelve_symptoms_names_a_test_that_exists() -> None:
    sections = re.split(
        r"^## (?=\d+\. )", (ROOT / "docs/troubleshooting.md").read_text(), flags=re.MULTILINE
    )[1:]
    assert [int(section.split(".")[0]) for section in sections] == list(range(1, 13))
    for section in sections:
        tests = re.findall(r"`(tests/[^`]+)`", section.partition("\nTest: ")[2])
        assert tests, section.splitlines()[0]
        assert [name for name in tests if not named_test(name)] == [], section.splitlines()[0]


# ---- installing --------------------------------------------------------------------------------------------

_FROM_AN_INDEX = re.compile(
    r"pip install (?:-{1,2}[\w-]+ )*['\"]?lastcall(?![\w.-]*\.whl|-\{|-['\"]?\s*in)[\['\"\s=<]", re.IGNORECASE
)


def test_nothing_says_that_lastcall_is_on_an_index() -> None:
    """A stranger could take the name."""
    said = [
        f"{path.relative_to(ROOT)}: {found[0]}"
        for path in TRACKED
        if path.suffix in (".py", ".md", ".toml", ".ipynb", ".yml", ".txt", "")
        and path.parts[len(ROOT.parts)] != "tests"
        and path != ROOT / "src/lastcall/installing.py"
        for found in _FROM_AN_INDEX.finditer(path.read_text(errors="replace"))
    ]
    assert said == []


def test_the_version_stands_in_one_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["hatch"]["version"] == {"path": "src/lastcall/__init__.py"}
    newest = re.findall(r"^## (\d[\d.]*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    assert newest == lastcall.__version__
    for page in PAGES:
        for version in re.findall(r"lastcall[-:](\d+\.\d+\.\d+)(?!-py3-none-any.whl`)", page.read_text()):
            assert version == lastcall.__version__, page


# ---- this machine ------------------------------------------------------------------------------------------

_PRIVATE = re.compile(r"(?:^|[^\w.$}])/(?:work|farm|tmp/h)/", re.MULTILINE)


def test_no_path_of_a_private_machine_is_in_the_repository() -> None:
    assert TRACKED or not (ROOT / ".git").exists()
    found = [
        str(path.relative_to(ROOT))
        for path in TRACKED
        if path.stat().st_size < 10_000_000 and _PRIVATE.search(path.read_bytes().decode(errors="replace"))
    ]
    assert found == []
