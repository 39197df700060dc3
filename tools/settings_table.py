"""The tables of settings in docs/reference/settings.md, made from src/lastcall/settings: one row a field,
with the sentence that stands under it.

python tools/settings_table.py            print the tables
python tools/settings_table.py --write    put them into that page, between the two markers
python tools/settings_table.py --check    fail if it has others
"""

from __future__ import annotations

import argparse
import ast
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from lastcall import settings  # noqa: E402 - this checkout's, whichever one is installed
from lastcall.settings import configurations  # noqa: E402

GUIDE = ROOT / "docs" / "reference" / "settings.md"
BEGIN = "<!-- settings: python tools/settings_table.py --write -->"
END = "<!-- /settings -->"
TABLES = (("JITCheckpointConfig", settings.JIT), ("PeriodicCheckpointConfig", settings.PERIODIC))
PAGES = {  # a page of docs/ that has more
    "stop_file": "notices.md#stop-file",
    "guard": "run.md",
    "ranks": "ranks.md",
    "progress_port": "progress.md",
    "progress_push": "kubeflow.md",
    "mirror": "mirror.md",
}


def doc_lines(source: str) -> dict[str, dict[str, str]]:
    """By class and field: the string that stands right under the field."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        lines = found.setdefault(node.name, {})
        for pair in itertools.pairwise(node.body):
            match pair:
                case ast.AnnAssign(target=ast.Name(id=field)), ast.Expr(value=ast.Constant(value=str(line))):
                    lines[field] = " ".join(line.split())
    return found


def tables() -> str:
    lines = doc_lines(Path(configurations.__file__).read_text(encoding="utf-8"))
    return "\n\n".join(_table(name, rows, lines[name]) for name, rows in TABLES)


def _table(name: str, rows: Sequence[settings.Setting], lines: dict[str, str]) -> str:
    head = [f"| `{name}` | variable | default | |", "|---|---|---|---|"]
    return "\n".join([*head, *(_row(row, lines[row.field]) for row in rows)])


def _row(row: settings.Setting, line: str) -> str:
    if page := PAGES.get(row.field):
        line = f"{line} See [{page.partition('#')[0]}](../{page})."
    line = line.replace("|", r"\|")
    variables = ", ".join(f"`{variable}`" for variable in (row.variable, row.alias) if variable)
    return f"| `{row.field}` | {variables} | {_shown(row.default)} | {line} |"


def _shown(default: object) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, tuple):
        return ", ".join(default)
    return "none" if default is None else str(default)


def replaced(text: str, made: str) -> str:
    """The text with these tables between its markers."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(
            f"{GUIDE} has no markers for the tables of settings: put {BEGIN} and {END} where they belong"
        )
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The tables of settings in docs/reference/settings.md.")
    parser.add_argument("--write", action="store_true", help="put them into that page")
    parser.add_argument("--check", action="store_true", help="fail if it has others")
    args = parser.parse_args(arguments)
    if not (args.write or args.check):
        sys.stdout.write(tables() + "\n")
        return 0
    text = GUIDE.read_text(encoding="utf-8")
    wanted = replaced(text, tables())
    if args.write:
        GUIDE.write_text(wanted, encoding="utf-8")
    elif wanted != text:
        sys.stderr.write(
            "docs/reference/settings.md has other settings than src/lastcall/settings: python "
            "tools/settings_table.py --write\n"
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
