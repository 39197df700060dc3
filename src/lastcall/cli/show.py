"""`lastcall show`: one checkpoint in detail, without reading its tensors."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lastcall import errors
from lastcall.cli import ls, output
from lastcall.core.checkpoint import catalog as catalogs
from lastcall.core.checkpoint.record import Record
from lastcall.formats import safetensors

_SHORT = 12  # digits that are enough to distinguish two digests
_EXAMPLES = """examples:
  lastcall show runs/exp1
  lastcall show runs/exp1/checkpoint-300 --json
"""
_JSON = {
    **ls.CHECKPOINT,
    "run": "the run's name for itself",
    "save": "the name of the save, the same on all ranks",
    "algorithm": "how digests are made",
    "missing": "files that there was no time for",
    "doubt": "why it is not exact although all that was handed over is in it",
    "version": "the version of lastcall that wrote it",
    "files": "its files",
    "files[].name": "the name of the file",
    "files[].size": "its bytes",
    "files[].digest": "its digest",
    "files[].chunk": "bytes of a chunk",
    "files[].chunks": "the number of chunks",
    "files[].tensors": "the number of tensors, or null where it holds none",
    "files[].problem": "why its header cannot be read, or null",
    "tensors": "what the tensor files hold",
    "tensors.count": "the number of tensors",
    "tensors.bytes": "their bytes",
    "tensors.dtypes": "count and bytes for each dtype",
    "resume": "what a run that starts now resumes from, or null",
    "resume.name": "the name of that checkpoint",
    "resume.step": "its step",
    "resume.exact": "whether it is exact",
    "resume.this": "whether it is the one shown",
}


@dataclass
class Tensors:
    """The contents of the tensor files' headers."""

    by_dtype: dict[str, list[int]] = field(default_factory=dict)  # dtype -> count, bytes
    in_file: dict[str, int] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return sum(count for count, _ in self.by_dtype.values())

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self.by_dtype.values())


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "show",
        description="Shows one checkpoint in detail: the newest of a run, or the one named.",
        epilog=_EXAMPLES,
    )
    parser.add_argument(
        "path", metavar="DIR[/checkpoint-N]", type=Path, help="the directory of a run, or a checkpoint"
    )
    output.add_json(parser, _JSON)
    parser.set_defaults(call=run)


def run(args: argparse.Namespace) -> int:
    found, others = choose(args.path)
    tensors = _tensors(found)
    resumed = ls.resumes(others)
    if args.json:
        output.document(_json(found, tensors, resumed))
    else:
        _print(found, tensors, resumed)
    return 0


def choose(path: Path) -> tuple[ls.Found, list[ls.Found]]:
    """The checkpoint that a path names, and all checkpoints in its directory."""
    if (named := ls.checkpoint(path)) is not None:
        root = named.parent
        if root.parts[-2:] == (catalogs.PRIVATE, "staging"):
            root = root.parent.parent
        found = ls.look(named)
        if found is None:
            raise errors.LastcallError(f"{path} does not exist. List what exists with: lastcall ls {root}")
        return found, ls.survey(root)
    root = ls.single(path)
    others = ls.survey(root)
    committed = [item for item in others if item.committed]
    if not committed:
        raise errors.LastcallError(
            f"{root} holds no committed checkpoint. List what exists with: lastcall ls {root}"
        )
    return committed[0], others


def _tensors(found: ls.Found) -> Tensors:
    tensors = Tensors()
    for file in found.record.files if found.record else ():
        if not file.name.endswith(".safetensors"):
            continue
        path = found.path / file.name
        try:
            stored, _ = safetensors.parse(safetensors.read_header(path), path.stat().st_size)
        except (errors.CheckpointError, OSError) as error:
            tensors.unreadable[file.name] = str(error)
            continue
        tensors.in_file[file.name] = len(stored)
        for tensor in stored.values():
            total = tensors.by_dtype.setdefault(tensor.dtype, [0, 0])
            total[0] += 1
            total[1] += tensor.end - tensor.begin
    return tensors


def _json(found: ls.Found, tensors: Tensors, resumed: ls.Found | None) -> dict[str, object]:
    record = found.record
    files = [
        {
            "name": file.name,
            "size": file.size,
            "digest": file.digest,
            "chunk": file.chunk,
            "chunks": len(file.chunks),
            "tensors": tensors.in_file.get(file.name),
            "problem": tensors.unreadable.get(file.name),
        }
        for file in (record.files if record else ())
    ]
    return {
        **ls.describe(found),
        "run": record.run if record else None,
        "save": record.save if record else None,
        "algorithm": record.algorithm if record else None,
        "missing": list(record.missing) if record else None,
        "doubt": record.doubt if record else None,
        "version": record.version if record else None,
        "files": files,
        "tensors": {
            "count": tensors.count,
            "bytes": tensors.nbytes,
            "dtypes": {
                dtype: {"count": count, "bytes": nbytes}
                for dtype, (count, nbytes) in sorted(tensors.by_dtype.items())
            },
        },
        "resume": None
        if resumed is None or resumed.record is None
        else _resume_json(found, resumed, resumed.record),
    }


def _resume_json(found: ls.Found, resumed: ls.Found, record: Record) -> dict[str, object]:
    return {
        "name": resumed.path.name,
        "step": record.step,
        "exact": record.exact,
        "this": _same(found, resumed),
    }


def _same(one: ls.Found, other: ls.Found) -> bool:
    return os.path.abspath(one.path) == os.path.abspath(other.path)


def _print(found: ls.Found, tensors: Tensors, resumed: ls.Found | None) -> None:
    output.write(output.printable(str(found.path)))
    _pairs({"status": found.status.value + (f": {found.problem}" if found.problem else "")})
    if found.record is None:
        now = time.time()
        _pairs(
            {
                "size": output.size(found.size),
                "created": f"{output.moment(found.created)} ({output.age(found.created, now)})",
            }
        )
    else:
        _pairs(_facts(found.record))
    _pairs({"resumes": _resumption(found, resumed)})
    if found.record is None:
        return
    output.write()
    rows = [
        (file.name, output.size(file.size), _count(tensors, file.name), file.digest[:_SHORT])
        for file in found.record.files
    ]
    output.table(
        ("FILE", "SIZE", "TENSORS", "DIGEST"),
        rows,
        right=("SIZE", "TENSORS"),
        indent="  ",
        spared=("DIGEST",),
    )
    for problem in tensors.unreadable.values():
        output.say(f"  {output.printable(problem)}", hang="    ")
    if tensors.by_dtype:
        output.write()
        by_size = sorted(tensors.by_dtype.items(), key=lambda item: -item[1][1])
        kinds = [(dtype, str(count), output.size(nbytes)) for dtype, (count, nbytes) in by_size]
        output.table(("DTYPE", "TENSORS", "BYTES"), kinds, right=("TENSORS", "BYTES"), indent="  ")


def _count(tensors: Tensors, name: str) -> str:
    return "?" if name in tensors.unreadable else str(tensors.in_file.get(name, "-"))


def _facts(record: Record) -> dict[str, str]:
    taken_over = record.size - record.written
    metrics = ", ".join(f"{name} {output.number(value)}" for name, value in record.metrics.items())
    return {
        "step": str(record.step),
        "kind": record.kind.value,
        "reason": record.reason or "none",
        "exact": "yes" if record.exact else f"no: {record.because}",
        "complete": "yes" if record.complete else f"no: without {', '.join(record.missing)}",
        "created": f"{output.moment(record.created)} ({output.age(record.created, time.time())})",
        "took": output.duration(record.seconds),
        "size": output.size(record.size)
        + (
            f", of which {output.size(taken_over)} are shared with the previous checkpoint"
            if taken_over > 0
            else ""
        ),
        "metrics": metrics or "none",
        "run": record.run or "unnamed",
        "incarnation": str(record.incarnation),
        "world": "1 process" if record.world == 1 else f"{record.world} processes",
        "sequence": str(record.sequence),
        "digests": record.algorithm,
    }


def _resumption(found: ls.Found, resumed: ls.Found | None) -> str:
    """What a run that starts now would resume from."""
    if resumed is None or resumed.record is None:
        return "a run that starts now would start from scratch: there is no valid checkpoint"
    to = f"step {resumed.record.step}{'' if resumed.record.exact else ', not exactly'}"
    if _same(found, resumed):
        return f"a run that starts now would resume from this one, at {to}"
    return f"a run that starts now would resume from {resumed.path.name}, at {to}"


def _pairs(pairs: Mapping[str, str]) -> None:
    for name, value in pairs.items():
        output.pair(name, value, 12, states=("status", "exact", "complete"))
