"""Whether the command that started a script would resume from what the script's own save leaves: known before
anything is lost.

A script resumes by load_state(), and only the script knows when. From outside it can be seen that it has no
such call; that it loads what the command names, which is not what will be saved; or that a condition on an
option that was not given keeps it from loading. Where a condition is about anything else (the contents of a
folder, most of all), the script finds its checkpoints itself.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import linecache
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

from lastcall import settings

_MOST = 400  # variables of a frame that are examined


def why_not(frame: FrameType, loaded: str | None, argv: Sequence[str]) -> str:
    """Empty where the same command is expected to resume. `loaded`: the argument of load_state() in this
    process."""
    if settings.hands_over():
        return ""
    if loaded is not None:
        names = _names(argv, loaded)
        return f"the command names {loaded}, and would resume from there again" if names else ""
    frames = list(_user_frames(frame))
    places = [place for file in _sources(frames) for place in _loads(file)]
    if not places:
        return "the script never calls load_state()"
    kept_out = [_kept_out(needs, frames, argv) for _, needs in places]
    where, _ = places[0]
    return f"`{kept_out[0]}` keeps it from load_state() ({where})" if all(kept_out) else ""


def folders(frame: FrameType, argv: Sequence[str]) -> list[str]:
    """Paths that the script works with: arguments of its command, and the values of its variables and
    options."""
    found = dict.fromkeys(value for word in argv for value in (word, word.partition("=")[2]) if value)
    for one in _user_frames(frame):
        for scope in (one.f_locals, one.f_globals):
            for value in list(scope.values())[:_MOST]:
                for inner in getattr(value, "__dict__", {}).values() if _is_options(value) else [value]:
                    if isinstance(inner, str | os.PathLike) and 0 < len(os.fspath(inner)) < 1000:
                        found[os.fspath(inner)] = None
    return [
        path
        for path in found
        if isinstance(path, str) and "\n" not in path and "\0" not in path and os.path.isdir(path)
    ]


def works_with(folder: str, frame: FrameType, argv: Sequence[str]) -> bool:
    """Whether the script may look for its checkpoints there, and take anything that it finds for one of
    them."""
    return any(
        os.path.realpath(path) == os.path.realpath(folder) for path in (os.curdir, *folders(frame, argv))
    )


def _names(argv: Sequence[str], path: str) -> bool:
    values = (value for word in argv for value in (word, word.partition("=")[2]) if value)
    return any(os.path.realpath(value) == os.path.realpath(path) for value in values)


def _user_frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            yield frame
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__":
            return  # the frames above started the script
        frame = frame.f_back


def _is_users(file: str) -> bool:
    return (
        bool(file)
        and not file.startswith("<")
        and "site-packages" not in file
        and not file.startswith(sys.base_prefix + os.sep + "lib")
    )


def _sources(frames: Sequence[FrameType]) -> list[str]:
    """The files of the script: those of its frames, and of the modules of its own that it has imported."""
    found = dict.fromkeys(frame.f_code.co_filename for frame in frames)
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if (
            isinstance(file, str)
            and file.endswith(".py")
            and _is_users(file)
            and not _is_ours(getattr(module, "__name__", ""))
        ):
            found[file] = None
    return list(found)


def _is_ours(name: str) -> bool:
    return f"{name}.".startswith("lastcall.")


Need = tuple[ast.expr, bool]


def _loads(file: str) -> Iterator[tuple[str, list[Need]]]:
    """The calls of load_state() in a file: where, and the conditions around each."""
    source = "".join(linecache.getlines(file))
    if "load_state(" not in source:
        return
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    yield from ((f"{Path(file).name}:{line}", needs) for line, needs in _below(tree, []))


def _below(node: ast.AST, needs: list[Need]) -> Iterator[tuple[int, list[Need]]]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load_state":
        yield node.lineno, needs
    if isinstance(node, ast.If):
        yield from _below(node.test, needs)
        for body, want in ((node.body, True), (node.orelse, False)):
            for statement in body:
                yield from _below(statement, [*needs, (node.test, want)])
        return
    for child in ast.iter_child_nodes(node):
        yield from _below(child, needs)


def _kept_out(needs: Sequence[Need], frames: Sequence[FrameType], argv: Sequence[str]) -> str:
    """The condition on an option of the command that keeps the script from loading; empty where there is
    none."""
    for test, want in needs:
        roots = _roots(test)
        if not roots or any(_given(name, argv) for name in _options(test)):
            continue
        names = {root: _found(root, frames) for root in roots}
        if not all(_is_options(value) for value in names.values()):
            continue
        try:
            holds = bool(
                eval(compile(ast.Expression(test), "<condition>", "eval"), {"__builtins__": {}}, names)
            )
        except Exception:
            continue
        if holds is not want:
            return ast.unparse(test)
    return ""


def _roots(test: ast.expr) -> set[str]:
    """The names that a plain condition on options begins with; none where it is of another kind."""
    plain = (
        ast.Name,
        ast.Attribute,
        ast.Constant,
        ast.Compare,
        ast.BoolOp,
        ast.UnaryOp,
        ast.boolop,
        ast.unaryop,
        ast.cmpop,
        ast.Load,
    )
    if not all(isinstance(node, plain) for node in ast.walk(test)):
        return set()
    return {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}


def _options(test: ast.expr) -> set[str]:
    return {node.attr for node in ast.walk(test) if isinstance(node, ast.Attribute)}


def _given(option: str, argv: Sequence[str]) -> bool:
    """Whether the command has it; a script may have reset it since, where it found nothing to resume from."""
    spelled = option.replace("-", "_")
    return any(
        word.partition("=")[0].lstrip("-").replace("-", "_").rpartition(".")[2] == spelled
        for word in argv
        if word
    )


def _found(name: str, frames: Sequence[FrameType]) -> Any:
    for frame in frames:
        if name in frame.f_locals:
            return frame.f_locals[name]
    return next((frame.f_globals[name] for frame in frames if name in frame.f_globals), None)


def _is_options(value: Any) -> bool:
    return isinstance(value, argparse.Namespace | SimpleNamespace) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type)
    )
