"""The pages of docs/reference that are made from the source: API, events, exit codes, commands. (Settings:
settings_table.py.)

python tools/reference.py --write    write them
python tools/reference.py --check    fail if they are not what the source says
"""

from __future__ import annotations

import argparse
import ast
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
sys.path.insert(0, str(SOURCE))

from lastcall import errors  # noqa: E402 - this checkout's, whichever one is installed
from lastcall.cli import output  # noqa: E402
from lastcall.cli import parser as parsers  # noqa: E402
from lastcall.core.notice.phases import Phase  # noqa: E402
from lastcall.core.process import exits  # noqa: E402
from lastcall.launch import command, platforms  # noqa: E402
from lastcall.types import Notice  # noqa: E402

FOLDER = ROOT / "docs" / "reference"
NOTE = "<!-- made by tools/reference.py --write from the source: change it there -->"

# ---- API ---------------------------------------------------------------------------------------------------

# a heading, the module, and the name in it
API = (
    ("lastcall.protect", "lastcall.adapters.torch.run", "protect"),
    ("lastcall.Run", "lastcall.adapters.torch.run", "Run"),
    ("lastcall.JITCheckpointConfig", "lastcall.settings.configurations", "JITCheckpointConfig"),
    ("lastcall.PeriodicCheckpointConfig", "lastcall.settings.configurations", "PeriodicCheckpointConfig"),
    (
        "lastcall.transformers.JITCheckpointCallback",
        "lastcall.adapters.transformers.callback",
        "JITCheckpointCallback",
    ),
    ("lastcall.ray.RunConfig", "lastcall.adapters.ray.driver.config", "RunConfig"),
    ("lastcall.ray.protect", "lastcall.adapters.ray.saves.protect", "protect"),
    ("lastcall.kubeflow.TransformersTrainer", "lastcall.adapters.kubeflow.trainer", "TransformersTrainer"),
    ("lastcall.dcp.Writer", "lastcall.adapters.torch.dcp.writer", "Writer"),
    ("lastcall.dcp.Reader", "lastcall.adapters.torch.dcp.reader", "Reader"),
    ("lastcall.dcp.to_torch_save", "lastcall.adapters.torch.dcp.reader", "to_torch_save"),
)
WITH_MEMBERS = ("lastcall.Run", "lastcall.JITCheckpointConfig", "lastcall.PeriodicCheckpointConfig")


def members(module: str, name: str) -> list[str]:
    """The public methods and documented fields of a class, as they stand."""
    tree = ast.parse((SOURCE / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    names = []
    for node in found.body:
        match node:
            case ast.FunctionDef(name=each) | ast.AnnAssign(target=ast.Name(id=each)):
                names.append(each)
    return [each for each in dict.fromkeys(names) if not each.startswith("_")]


def api() -> Iterator[str]:
    yield "# API"
    yield "The public names of lastcall, with their docstrings. `import lastcall` imports no framework."
    for title, module, name in API:
        shown = members(module, name) if title in WITH_MEMBERS else []
        directive = [f"::: {module}.{name}", "    options:", f"      heading: {title}"]
        directive += [f"      toc_label: {title}", "      heading_level: 2"]
        if shown:
            directive += ["      members:", *(f"        - {each}" for each in shown)]
        else:
            directive += ["      members: false"]
        yield "\n".join(directive)
    yield "## Errors"
    yield "`lastcall.errors` has them all; the first ones are in `lastcall`, too."
    yield "| error | what it says |\n|---|---|\n" + "\n".join(
        f"| `{kind.__name__}` | {_sentence(kind.__doc__)} |" for kind in _errors()
    )


def _errors() -> list[type[BaseException]]:
    found = [
        each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, BaseException)
    ]
    return [each for each in found if each.__module__ == errors.__name__]


def _sentence(text: str | None) -> str:
    words = " ".join((text or "").split())
    return words.partition(". ")[0].rstrip(".")


# ---- events ------------------------------------------------------------------------------------------------

EVENTS = {
    "start": "An incarnation begins: which one, and the checkpoint that it resumed from (null: none).",
    "notice": "News that the run must stop: from where, why, seconds until the deadline, the step.",
    "phase": f"A notice has reached a new phase: {', '.join(phase.value for phase in Phase)}.",
    "agreement": "The ranks have agreed on what to save.",
    "save-begins": "A save begins: its kind (`save`), its step, its bytes.",
    "committed": "A checkpoint exists: exact or not and why, how long it took, what was written.",
    "not-saved": "One attempt to save has failed, and why.",
    "pruned": "A checkpoint was removed, as `save_total_limit` asks.",
    "copied": "A checkpoint was uploaded to the mirror.",
    "fetched": "A checkpoint was downloaded from the mirror.",
    "stop": "The incarnation is over: finished, saved, not saved or failed.",
    "dropped": "So many events before this one never reached the file: the disk was full, or too slow.",
}


def emitted() -> dict[str, list[str]]:
    """By kind: its fields, as far as the source names them."""
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for path in sorted((SOURCE / "lastcall").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(
                    func=ast.Attribute(attr="emit" | "_emit"),
                    args=[ast.Constant(value=str(kind))],
                    keywords=given,
                ):
                    found[kind].update(dict.fromkeys(each.arg for each in given if each.arg))
                case ast.Call(
                    func=ast.Name(id="_line"),
                    args=[_, ast.Constant(value=str(kind)), ast.Dict(keys=keys)],
                ):
                    found[kind].update(
                        (str(each.value), None) for each in keys if isinstance(each, ast.Constant)
                    )
    return {kind: sorted(fields) for kind, fields in found.items()}


def events() -> Iterator[str]:
    fields = emitted()
    if strange := fields.keys() ^ EVENTS.keys():
        raise SystemExit(f"tools/reference.py and the source disagree about these events: {sorted(strange)}")
    yield "# Events"
    yield (
        "One JSON object a line, in `.lastcall/events-RANK.jsonl` of the run's directory: at most 4 MB, and "
        "as much again in `events-RANK.jsonl.1`. Every event has `at` (seconds since 1970) and `kind`. New "
        "kinds and fields may come at any time. `lastcall watch` shows the latest."
    )
    yield "| kind | fields | |\n|---|---|---|\n" + "\n".join(
        f"| `{kind}` | {', '.join(f'`{each}`' for each in fields[kind])} | {line} |"
        for kind, line in EVENTS.items()
    )


# ---- exit codes --------------------------------------------------------------------------------------------


def exit_codes() -> Iterator[str]:
    def notice(signum: int | None) -> Notice:
        return Notice(source="signal", reason="", at=0.0, deadline=None, signum=signum)

    default = platforms.PLATFORMS[-1].exit_code
    cases = (
        ("training finished", 0),
        ("a notice, and a checkpoint was committed", exits.code(notice(signal.SIGTERM), True, default)),
        ("SIGTERM, and nothing was committed", exits.code(notice(signal.SIGTERM), False, default)),
        (
            "SIGUSR1 as a notice, and nothing was committed",
            exits.code(notice(signal.SIGUSR1), False, default),
        ),
        ("a notice that is no signal, and nothing was committed", exits.code(notice(None), False, default)),
        (
            "Ctrl-C with SIGINT among the signals, saved or not",
            exits.code(notice(signal.SIGINT), True, default),
        ),
        ("a wrong setting", errors.EXIT_CONFIG),
        ("`lastcall run`: the command was not found", command.NOT_FOUND),
        ("`lastcall run`: the command cannot be executed", command.NOT_EXECUTABLE),
    )
    yield "# Exit codes"
    yield (
        "Who decides, and what comes out of a script without a notice: [guide](../guide.md#exit-codes); "
        + ("through `lastcall run`: [run](../run.md#exit-codes).")
    )
    yield "| what happened | code |\n|---|---|\n" + "\n".join(f"| {what} | {code} |" for what, code in cases)
    yield "## Saved, run me again: by platform"
    yield "`lastcall run` detects the platform; `--exit-code` and `LASTCALL_EXIT_CODE` win."
    yield "| platform | detected by | code |\n|---|---|---|\n" + "\n".join(
        f"| {each.name} | {_signs(each)} | {each.exit_code} |" for each in platforms.PLATFORMS
    )
    yield "## Errors that end a start"
    rows = [each for each in _errors() if issubclass(each, errors.LastcallError)]
    yield "| error | code |\n|---|---|\n" + "\n".join(
        f"| `{each.__name__}` | {_code(each)} |" for each in rows
    )


def _code(kind: type[errors.LastcallError]) -> int:
    return errors.EXIT_CONFIG if issubclass(kind, errors.ConfigError) else kind.exit_code


def _signs(platform: platforms.Platform) -> str:
    signs = [f"`{each}`" for each in platform.variables]
    return ", ".join([*signs, *([f"`{platform.prefix}*`"] if platform.prefix else [])]) or "nothing else"


# ---- commands ----------------------------------------------------------------------------------------------


def commands() -> Iterator[str]:
    yield "# Commands"
    yield (
        "What `lastcall COMMAND --help` says, and the fields of `--json`; every document also has `schema`. "
        "What they print: [commands](../commands.md)."
    )
    parser = parsers.build(parsers.COMMANDS)
    below = parsers.below(parser)
    assert below is not None
    for names in parsers.GROUPS.values():
        for name in names:
            yield from _command(below.choices[name], 2)


def _command(parser: argparse.ArgumentParser, level: int) -> Iterator[str]:
    yield f"{'#' * level} {parser.prog}"
    if parser.description:
        yield _plain(parser.description)
    rows: list[str] = []
    fields: dict[str, str] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction | argparse._HelpAction):
            continue
        if action.help != argparse.SUPPRESS:
            rows.append(f"| {_named(action)} | {_plain(_help(parser, action))} |")
        if isinstance(action, output.JsonFlag):
            fields = action.fields
    if rows:
        yield "| argument | |\n|---|---|\n" + "\n".join(rows)
    if fields:
        yield "| field of `--json` | |\n|---|---|\n" + "\n".join(
            f"| {_code_of(name)} | {_plain(text)} |" for name, text in fields.items()
        )
    below = parsers.below(parser)
    for each in below.choices.values() if below else ():
        yield from _command(each, level + 1)


def _named(action: argparse.Action) -> str:
    values = action.choices and "|".join(map(str, action.choices))
    value = action.metavar or values or action.dest.upper()
    value = " ".join(value) if isinstance(value, tuple) else value
    if not action.option_strings:
        return _code_of(value)
    takes = "" if action.nargs == 0 else f" {value}"
    return ", ".join(_code_of(f"{each}{takes}") for each in action.option_strings)


def _code_of(text: str) -> str:
    return "`" + text.replace("|", r"\|") + "`"


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    return parser._get_formatter()._expand_help(action) if action.help else ""


def _plain(text: str) -> str:
    """In a table cell, or a paragraph; what stands in angle brackets would be HTML."""
    return " ".join(text.split()).replace("|", r"\|").replace("<", "&lt;")


# ---- all of them -------------------------------------------------------------------------------------------

PAGES: dict[str, Callable[[], Iterator[str]]] = {
    "api.md": api,
    "events.md": events,
    "exit-codes.md": exit_codes,
    "commands.md": commands,
}


def pages() -> dict[Path, str]:
    return {FOLDER / name: "\n\n".join([NOTE, *made()]) + "\n" for name, made in PAGES.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The pages of docs/reference that are made from the source.")
    parser.add_argument("--write", action="store_true", help="write them")
    parser.add_argument("--check", action="store_true", help="fail if they are not what the source says")
    args = parser.parse_args(arguments)
    made: dict[Path, Any] = pages()
    if args.write:
        FOLDER.mkdir(exist_ok=True)
        for path, text in made.items():
            path.write_text(text, encoding="utf-8")
        return 0
    old = [
        path for path, text in made.items() if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    sys.stderr.writelines(
        f"{path.relative_to(ROOT)} is not what the source says: python tools/reference.py --write\n"
        for path in old
    )
    return 1 if old and args.check else 0


if __name__ == "__main__":
    sys.exit(main())
