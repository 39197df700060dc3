"""`lastcall export`: a checkpoint as one plain file that can be read without lastcall: safetensors, or a
`.pt` for torch.load(weights_only=True).

The bytes go chunk by chunk from the checkpoint to their place in the new file, each chunk checked against its
digest before, so memory stays small however large the tensors are and however many pieces they are in. The
new file is renamed into place when complete.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import sys
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lastcall import errors, memory
from lastcall.cli import output, show, verify
from lastcall.core.engine import writer
from lastcall.core.restore.inventory import Inventory, Place
from lastcall.formats import safetensors, torchzip
from lastcall.storage import files as storage
from lastcall.types import FileLayout, TensorEntry

_FORMATS = ("safetensors", "pt")
_TORCH = (".pt", ".pth", ".bin", ".ckpt")  # the usual suffixes of what torch.save writes
_ONE = "--name"
_EXAMPLES = """examples:
  lastcall export runs/exp1 model.safetensors --name model
  lastcall export runs/exp1/checkpoint-300 all.pt
"""
_JSON = {
    "checkpoint": "the absolute path of the checkpoint",
    "out": "the absolute path of the new file",
    "format": "safetensors or pt",
    "name": "the value of --name, or null",
    "tensors": "the number of tensors in it",
    "size": "its bytes",
    "seconds": "how long it took",
}


@dataclass(frozen=True)
class ExportSlot:
    """The bytes of a tensor in the new file, from `begin` on. Both a Source (for checksums) and a Target."""

    fd: int
    nbytes: int
    begin: int

    def read_into(self, address: int, offset: int, nbytes: int) -> None:
        done = 0
        while done < nbytes:
            got = os.preadv(self.fd, [memory.view(address + done, nbytes - done)], self.begin + offset + done)
            if got <= 0:
                raise errors.LastcallError("the new file was truncated while being written")
            done += got

    def write_from(self, address: int, offset: int, nbytes: int) -> None:
        storage.write_all(storage.Files(), self.fd, [memory.view(address, nbytes)], self.begin + offset)


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "export",
        description="Exports the tensors of a checkpoint to one plain file that can be read without "
        "lastcall, checking each digest.",
        epilog=_EXAMPLES,
    )
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        type=Path,
        help="a checkpoint, or the directory of a run (its newest checkpoint)",
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="the file to write")
    parser.add_argument(
        _ONE,
        metavar="NAME",
        help="export only the state that protect() got under this name, without the prefix; for a model, its "
        "state_dict",
    )
    parser.add_argument(
        "--format",
        choices=_FORMATS,
        help="the format of OUT (default: pt if it ends in .pt, .pth, .bin or .ckpt, else safetensors)",
    )
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    output.add_json(parser, _JSON)
    parser.set_defaults(call=run)


def run(args: argparse.Namespace) -> int:
    began = time.monotonic()
    kind: str = args.format or ("pt" if args.out.suffix in _TORCH else "safetensors")
    _check_out(args.out, force=args.force)
    found = Inventory(_checkpoint(args.checkpoint))
    chosen = _choose(found, args.name)
    stored = {name: found.tensor(place) for name, place in chosen.items()}
    total = sum(tensor.end - tensor.begin for tensor in stored.values())
    bar = verify.Bar(total, show=not args.json and output.interactive(sys.stderr))
    try:
        size = _export(args.out, kind, found, chosen, bar, force=args.force)
    finally:
        bar.wipe()
    seconds = time.monotonic() - began
    if args.json:
        output.document(
            {
                "checkpoint": os.path.abspath(found.path),
                "out": os.path.abspath(args.out),
                "format": kind,
                "name": args.name,
                "tensors": len(chosen),
                "size": size,
                "seconds": round(seconds, 4),
            }
        )
    else:
        what = f"{output.plural(len(chosen), 'tensor')}, {output.size(size)} in {output.duration(seconds)}"
        source = output.printable(str(found.path))
        output.say(f"{output.printable(str(args.out))}: {what}, from {source}", hang="  ")
    return 0


def _check_out(out: Path, *, force: bool) -> None:
    if out.is_dir():
        raise errors.LastcallError(
            f"{out} is a directory. Name the file to write, such as {out / 'model.safetensors'}"
        )
    if os.path.lexists(out) and not force:
        raise errors.LastcallError(f"{out} already exists. To replace it, add --force")
    if not out.parent.is_dir():
        raise errors.LastcallError(f"{out.parent} is not a directory. Create it with: mkdir -p {out.parent}")


def _checkpoint(path: Path) -> Path:
    found, _ = show.choose(path)
    if found.record is None:
        raise errors.LastcallError(
            f"{found.path} cannot be exported: {found.problem}. See what else there is with: "
            f"lastcall ls {found.path.parent}"
        )
    return found.path


def _choose(found: Inventory, name: str | None) -> dict[str, Place]:
    """The tensors to write, by the names that they get."""
    missing = [
        file for file in found.record.missing if name is None or file.split(".")[0].split("-")[0] == name
    ]
    if missing:
        what = f"{found.path} is partial: there was no time to save {', '.join(missing)}."
        raise errors.LastcallError(
            f"{what} Export one of its parts with {_ONE}: {', '.join(found.groups) or 'it has none'}"
        )
    if name is None:
        chosen = found.named()
    elif found.dcp is not None:
        chosen = {
            key.removeprefix(f"{name}."): place
            for key, place in found.named().items()
            if key.startswith(f"{name}.")
        }
    else:
        chosen = dict(found.groups.get(name, {}))
    if not chosen:
        there = sorted({key.split(".")[0] for key in found.named()})
        raise errors.LastcallError(
            f"{found.path} holds no tensors"
            + (
                f" under the name {name!r}. It has: {', '.join(there) or 'none at all'}"
                if name is not None
                else "."
            )
        )
    return chosen


# ---- the file ----------------------------------------------------------------------------------------------


def _export(
    out: Path, kind: str, found: Inventory, chosen: Mapping[str, Place], bar: verify.Bar, *, force: bool
) -> int:
    """Write beside the target, then rename it into place. Returns the size of the file."""
    files = storage.Files()
    partial = out.with_name(f".{out.name}.incomplete-{secrets.token_hex(4)}")
    fd = files.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    try:
        try:
            size = _fill(fd, kind, found, chosen, bar)
            files.fsync(fd)
        finally:
            files.close(fd)
        if force:
            files.rename(partial, out)
        else:
            _link(files, partial, out)
        files.sync_directory(out.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            files.unlink(partial)
        raise
    return size


def _link(files: storage.Files, partial: Path, out: Path) -> None:
    """Give the file its name, unless another process has taken it in the meantime."""
    try:
        files.link(partial, out)
    except FileExistsError:
        raise errors.LastcallError(f"{out} was created in the meantime. To replace it, add --force") from None
    except OSError:  # a file system without links
        files.rename(partial, out)
    else:
        files.unlink(partial)


def _fill(fd: int, kind: str, found: Inventory, chosen: Mapping[str, Place], bar: verify.Bar) -> int:
    stored = {name: found.tensor(place) for name, place in chosen.items()}
    layout, slots = _laid_out(fd, kind, stored, {})
    os.ftruncate(fd, layout.size)
    engine = writer.Engine(files=bar)
    try:
        found.load(engine, [(place, slots[name]) for name, place in chosen.items() if slots[name].nbytes])
    finally:
        engine.close()
    if kind == "pt":  # now that the bytes are written, their checksums are known
        layout, _ = _laid_out(fd, kind, stored, slots)
    for extent in layout.extents:
        if isinstance(extent.source, memory.BytesSource):
            storage.write_all(storage.Files(), fd, [memoryview(extent.source.data)], extent.offset)
    return layout.size


def _laid_out(
    fd: int, kind: str, stored: Mapping[str, safetensors.Stored], known: Mapping[str, ExportSlot]
) -> tuple[FileLayout, dict[str, ExportSlot]]:
    """The layout of the new file, and where each tensor goes in it. With `known` slots their bytes are read
    for the checksums."""
    blank = known or {name: ExportSlot(fd, tensor.end - tensor.begin, 0) for name, tensor in stored.items()}
    if kind == "pt":
        tree = OrderedDict(
            (name, torchzip.ZippedTensor(one.dtype, one.shape, None, blank[name]))
            for name, one in stored.items()
        )
        layout = torchzip.layout("the new file", tree, crc=bool(known))
    else:
        entries = [TensorEntry(name, one.dtype, one.shape, blank[name]) for name, one in stored.items()]
        try:
            layout = safetensors.layout("the new file", entries, {"format": "pt"})
        except ValueError as error:  # a reserved name, or too long a header
            raise errors.LastcallError(f"safetensors cannot hold this: {error}. Try --format pt") from None
    begins = {id(extent.source): extent.offset for extent in layout.extents}
    return layout, {
        name: ExportSlot(fd, slot.nbytes, begins.get(id(slot), 0)) for name, slot in blank.items()
    }
