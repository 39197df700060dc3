"""`make house`: counts what makes the source hard to enter, and fails when a count grows.

Each check has an ideal and a limit. Where the ideal is not reached yet, the limit is a ratchet: it may only
fall. A commit that brings a count down lowers its limit, too. `--list CHECK` prints every place of a check.

Discarded: ruff's own limits for lengths and words. They know no folder, no other module and no past.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import textwrap
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple


class Limit(NamedTuple):
    limit: int
    ideal: int
    why: str  # for a word: what to write instead
    remedy: str


_PLAIN = "Say it in plain English; the table has what to write."

LIMITS = {
    "modules": Limit(
        14,
        12,
        "modules in the fullest folder: about a dozen",
        "Give a subject of this folder a folder of its own.",
    ),
    "files": Limit(
        7,
        0,
        "files over 500 lines: one concept a file",
        "Move one concept to a file of its own; do not cut one in two.",
    ),
    "functions": Limit(
        2,
        0,
        "functions over 60 lines: they fit on a screen",
        "Give a part of the function a name of its own.",
    ),
    "session": Limit(
        1,
        0,
        "session.X.Y outside core/session.py",
        "Ask the session for it, or pass X itself instead of the session.",
    ),
    "classes": Limit(
        25, 0, "class names in two modules: one word, one thing", "Choose a name that says which one it is."
    ),
    "strays": Limit(
        0,
        0,
        "files of tests/unit without their module's name",
        "Name it test_MODULE.py or test_MODULE_SUBJECT.py, in the folder of the module.",
    ),
    "untested": Limit(
        206,
        0,
        "modules without a unit test file of their own",
        "Write tests/unit/FOLDER/test_MODULE.py; other tests of it may stay where they are.",
    ),
    "is told": Limit(0, 0, "gets, learns, receives; or say who tells", _PLAIN),
    "was told": Limit(0, 0, "got, learned, received; or say who told", _PLAIN),
    "are told": Limit(0, 0, "get, learn, receive; or say who tells", _PLAIN),
    "goes on": Limit(0, 0, "continues", _PLAIN),
    "go on": Limit(0, 0, "continue", _PLAIN),
    "went on": Limit(0, 0, "continued", _PLAIN),
    "whoever": Limit(0, 0, "name who: the caller, a process that ...", _PLAIN),
    "nobody": Limit(0, 0, "no process, no rank, no user; or turn it round", _PLAIN),
    "anew": Limit(5, 0, "again, from scratch", _PLAIN),
    "by itself": Limit(0, 0, "automatically, alone, on its own", _PLAIN),
    "superfluous": Limit(0, 0, "expired, extra, no longer needed", _PLAIN),
    "at hand": Limit(0, 0, "available, loaded, known", _PLAIN),
}
WORDS = [name for name, limit in LIMITS.items() if limit.remedy == _PLAIN]
# folders with more modules are named; longer files and functions are counted
FOLDER, FILE, FUNCTION = 10, 500, 60
_BANNED = re.compile(r"\b(?:" + "|".join(word.replace(" ", r"\s+") for word in WORDS) + r")\b", re.IGNORECASE)


class Source(NamedTuple):
    name: str  # below src/lastcall
    text: str
    nodes: list[ast.AST]

    @property
    def path(self) -> str:
        return f"src/lastcall/{self.name}"


class Found(NamedTuple):
    now: int
    summary: list[str]  # a few words for each group, the largest first
    places: list[str]


def sources(root: Path) -> list[Source]:
    base = root / "src/lastcall"
    read = (
        (path.relative_to(base).as_posix(), path.read_text(encoding="utf-8"))
        for path in sorted(base.rglob("*.py"))
    )
    return [Source(name, text, list(ast.walk(ast.parse(text, name)))) for name, text in read]


def modules(files: Iterable[Source]) -> Found:
    """Of the fullest folder; its __init__.py does not count."""
    folders = Counter(str(Path(file.name).parent) for file in files if Path(file.name).name != "__init__.py")
    named = [(str(Path("lastcall", folder)), count) for folder, count in folders.most_common()]
    full = [f"{folder} {count}" for folder, count in named if count > FOLDER]
    return Found(max(folders.values(), default=0), full, [f"{count:4} {folder}" for folder, count in named])


def long_files(files: Iterable[Source]) -> Found:
    lengths = [(len(file.text.splitlines()), file) for file in files]
    return _by_length(
        [(lines, file.name, f"{file.path}:1 {lines} lines") for lines, file in lengths if lines > FILE]
    )


def long_functions(files: Iterable[Source]) -> Found:
    """From `def` to the last line, decorators left out."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    functions = [(file, node) for file in files for node in file.nodes if isinstance(node, kinds)]
    lengths = [((node.end_lineno or node.lineno) - node.lineno + 1, file, node) for file, node in functions]
    long = [(lines, file, node) for lines, file, node in lengths if lines > FUNCTION]
    return _by_length(
        [
            (lines, f"{file.name} {node.name}", f"{file.path}:{node.lineno} {node.name} {lines} lines")
            for lines, file, node in long
        ]
    )


def _by_length(found: list[tuple[int, str, str]]) -> Found:
    found.sort(key=lambda one: (-one[0], one[1]))
    return Found(
        len(found), [f"{name} {lines}" for lines, name, _ in found], [place for _, _, place in found]
    )


def session_accesses(files: Iterable[Source]) -> Found:
    """`session.X.Y`, `self._session.X.Y` and the like; `session.X.Y.Z` counts once."""
    counts: Counter[str] = Counter()
    places = []
    for file in files:
        for node in file.nodes if file.name != "core/session.py" else ():
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Attribute)
                and _is_session(node.value.value)
            ):
                counts[file.name] += 1
                places.append(f"{file.path}:{node.lineno} {ast.unparse(node)}")
    return Found(len(places), [f"{name} {count}" for name, count in counts.most_common()], places)


def _is_session(node: ast.expr) -> bool:
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name in ("session", "_session")


def twin_classes(files: Iterable[Source]) -> Found:
    """Names that several modules give to a class; `_Part` is `Part`."""
    places: dict[str, dict[str, str]] = defaultdict(dict)
    for file in files:
        for node in file.nodes:
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].setdefault(file.name, f"{file.path}:{node.lineno} {node.name}")
    twins = sorted(
        ((name, where) for name, where in places.items() if len(where) > 1),
        key=lambda twin: (-len(twin[1]), twin[0]),
    )
    return Found(
        len(twins),
        [f"{name} ({', '.join(module.removesuffix('.py') for module in where)})" for name, where in twins],
        [place for _, where in twins for place in where.values()],
    )


def mirror(root: Path, files: Iterable[Source]) -> dict[str, Found]:
    """tests/unit/core/test_session_end.py tests src/lastcall/core/session.py: the longest name that fits
    counts."""
    named = {file.name.removesuffix(".py") for file in files if Path(file.name).name != "__init__.py"}
    unit = root / "tests/unit"
    strays, tested = [], set()
    for path in sorted(unit.rglob("test_*.py")):
        test = path.relative_to(unit)
        words = test.stem.removeprefix("test_").split("_")
        names = ["_".join(words[:length]) for length in range(len(words), 0, -1)]
        module = next((m for name in names if (m := (test.parent / name).as_posix()) in named), None)
        if module is None:
            strays.append(path.relative_to(root).as_posix())
        else:
            tested.add(module)
    untested = [f"src/lastcall/{name}.py" for name in sorted(named - tested)]
    folders = Counter(str(Path(name).parent.relative_to("src/lastcall")) for name in untested)
    return {
        "strays": Found(len(strays), strays, strays),
        "untested": Found(
            len(untested), [f"{name} {count}" for name, count in folders.most_common()], untested
        ),
    }


def words(root: Path, files: Iterable[Source]) -> dict[str, Found]:
    """In strings, docstrings and comments of the source, and in the documents outside code blocks."""
    places: dict[str, list[str]] = {word: [] for word in WORDS}
    files_of: dict[str, Counter[str]] = {word: Counter() for word in WORDS}
    texts = [(file.path, text) for file in files for text in (*_strings(file), *_comments(file))]
    documents = [*root.glob("README.md"), *sorted(root.glob("docs/*.md"))]
    texts += [
        (path.relative_to(root).as_posix(), _prose(path.read_text(encoding="utf-8"))) for path in documents
    ]
    for path_name, (first, last, text) in texts:
        for match in _BANNED.finditer(text):
            word = " ".join(match[0].lower().split())
            line = min(last, first + text.count("\n", 0, match.start()))
            around = " ".join(text[max(0, match.start() - 30) : match.end() + 30].split())
            places[word].append(f"{path_name}:{line} {around}")
            files_of[word][path_name.removeprefix("src/lastcall/")] += 1
    return {
        word: Found(len(found), [f"{name} {count}" for name, count in files_of[word].most_common()], found)
        for word, found in places.items()
    }


_Text = tuple[int, int, str]  # its first and last line, and what stands there


def _strings(file: Source) -> Iterator[_Text]:
    for node in file.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.end_lineno or node.lineno, node.value


def _comments(file: Source) -> Iterator[_Text]:
    """Comments below one another are one text: a phrase may run over the end of a line."""
    if not _BANNED.search(file.text.replace("#", " ")):  # tokenizing takes most of the time
        return
    first = last = column = -1
    lines: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(file.text).readline):
        if token.type == tokenize.COMMENT:
            if token.start != (last + 1, column):
                yield first, last, "\n".join(lines)
                first, lines = token.start[0], []
            last, column = token.start
            lines.append(token.string.lstrip("# "))
    yield first, last, "\n".join(lines)


def _prose(text: str) -> _Text:
    """Code blocks become empty lines: fenced ones, and those that are indented by four after an empty
    line."""
    lines = text.splitlines()
    fenced = indented = False
    for number, line in enumerate(lines):
        fence = line.lstrip().startswith("```")
        indented = line.startswith("    ") and (indented or not number or not lines[number - 1].strip())
        if fenced or fence or indented:
            lines[number] = ""
        fenced ^= fence
    return 1, len(lines), "\n".join(lines)


_CHECKS: dict[str, Callable[[Iterable[Source]], Found]] = {
    "modules": modules,
    "files": long_files,
    "functions": long_functions,
    "session": session_accesses,
    "classes": twin_classes,
}


def count(root: Path) -> dict[str, Found]:
    files = sources(root)
    return {
        **{name: check(files) for name, check in _CHECKS.items()},
        **mirror(root, files),
        **words(root, files),
    }


def table(found: dict[str, Found]) -> Iterator[str]:
    yield f"{'check':<13}{'now':>4}{'limit':>7}{'ideal':>7}  what it counts; for a word, what to write"
    for name, (limit, ideal, why, _) in LIMITS.items():
        label = f'"{name}"' if name in WORDS else name
        yield f"{label:<13}{found[name].now:>4}{limit:>7}{ideal:>7}  {why}"
    for name in (*_CHECKS, "strays", "untested"):
        if first := found[name].summary[:6]:
            more = len(found[name].summary) - len(first)
            text = f"{name}: {'; '.join(first)}{f'; and {more} more: --list {name}' if more else ''}"
            yield from ("", *textwrap.wrap(text, 80, subsequent_indent="  ", break_on_hyphens=False))


def verdict(found: dict[str, Found]) -> tuple[list[str], list[str]]:
    """What is over its limit, with what to do; and which limits can be lowered."""
    over, loose = [], []
    for name, (limit, ideal, _, remedy) in LIMITS.items():
        now = found[name].now
        if now > limit:
            over.append(
                f"{name}: {now} is over the limit of {limit}. {remedy} Places: tools/house.py --list '{name}'"
            )
        elif max(now, ideal) < limit:
            loose.append(f'"{name}" to {max(now, ideal)}')
    return over, loose


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="tools/house.py", description="Counts what makes the source hard to enter."
    )
    parser.add_argument(
        "--root",
        type=Path,
        default=Path(__file__).resolve().parents[1],
        help="the checkout to look at (this one)",
    )
    parser.add_argument(
        "--list",
        choices=[*LIMITS, "words"],
        metavar="CHECK",
        help=f"print every place of one: {', '.join(LIMITS)}, words",
    )
    given = parser.parse_args(argv)
    if not (given.root / "src/lastcall").is_dir():
        parser.error(
            f"{given.root} has no src/lastcall, so there is nothing to count; give the root of a checkout"
        )
    found = count(given.root)
    if given.list:
        chosen = WORDS if given.list == "words" else [given.list]
        sys.stdout.writelines(f"{place}\n" for name in chosen for place in found[name].places)
        return 0
    over, loose = verdict(found)
    sys.stdout.writelines(f"{line}\n" for line in table(found))
    if loose:
        lower = f"These limits in tools/house.py can be lowered: {', '.join(loose)}."
        sys.stdout.write("\n" + textwrap.fill(lower, 80, subsequent_indent="  ") + "\n")
    sys.stdout.writelines(f"\n{textwrap.fill(line, 80, subsequent_indent='  ')}\n" for line in over)
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
