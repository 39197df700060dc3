"""`lastcall prune`: removes checkpoints that are no longer needed. Without `--apply` it only shows them; it
never removes while a run holds the directory.

Unlike a run's own rotation, this looks at the files of each checkpoint: one that has lost a file does not
count as one of the last two. And removed files are deleted instead of being kept as spare space for the next
save: a user who prunes by hand wants the space back."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lastcall import clock as clocks
from lastcall import errors
from lastcall.cli import ls, output
from lastcall.core.checkpoint import retention
from lastcall.core.checkpoint.catalog import Catalog
from lastcall.core.checkpoint.record import Entry
from lastcall.core.checkpoint.retention import Keep
from lastcall.storage import files as storage

_EXAMPLES = """examples:
  lastcall prune runs/exp1 --keep 3
  lastcall prune runs/exp1 --keep 3 --monitor loss --apply
"""
_JSON = {
    "directory": "the absolute path of the run",
    "applied": "whether it was done (--apply)",
    "remove": "the checkpoints to remove, each as in ls",
    "remove[].why": "why it is removed",
    "keep": "the checkpoints that stay, each as in ls",
    "keep[].why": "why it stays",
    "spare": "bytes of spare space to free",
    "frees": "bytes that are freed in all",
    "failed": "a sentence for each thing that could not be removed",
}


@dataclass(frozen=True)
class PrunePlan:
    """What would be removed and what would be kept, each with its reason."""

    remove: list[tuple[ls.Found, str]]
    keep: list[tuple[ls.Found, str]]
    spare: int  # bytes of spare space to remove
    frees: int  # bytes freed on the disk in all


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "prune",
        description="Shows what would be removed and how much space that frees; with --apply, removes it. "
        "The last two "
        "complete checkpoints and the best one are always kept.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("directory", metavar="DIR", type=Path, help="the directory of a run")
    parser.add_argument(
        "--keep", metavar="N", type=_count, help="keep the newest N checkpoints and remove older ones"
    )
    parser.add_argument("--monitor", metavar="METRIC", help="also keep the best checkpoint by this metric")
    parser.add_argument(
        "--mode",
        choices=("min", "max"),
        default="min",
        help="whether the lowest or the highest is the best (min)",
    )
    parser.add_argument("--damaged", action="store_true", help="remove those that were set aside as damaged")
    parser.add_argument(
        "--spare", action="store_true", help="free the spare space that is kept for the next save"
    )
    parser.add_argument("--apply", action="store_true", help="do it")
    output.add_json(parser, _JSON)
    parser.set_defaults(call=run, parser=parser)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1. For example: 3")
    return int(text)


def run(args: argparse.Namespace) -> int:
    if args.keep is None and not args.damaged and not args.spare:
        args.parser.error("choose what to remove: --keep N, --damaged, --spare")
    root = ls.single(args.directory)
    catalog = Catalog(root, storage.Files())
    plan, failed = _plan(catalog, args), []
    if args.apply and (plan.remove or plan.spare):
        _hold(catalog)
        try:
            plan = _plan(catalog, args)  # scan again: no other process changes anything from here on
            failed = _carry_out(catalog, plan, spare=args.spare)
        finally:
            catalog.close()
    _report(plan, root, args, failed)
    return 1 if failed else 0


def _hold(catalog: Catalog) -> None:
    try:
        catalog.open(clocks.Clock(), patience=0.0)
    except errors.BusyError as error:
        raise errors.BusyError(
            f"A run is active in {catalog.root}, and its checkpoints must not be removed meanwhile. Let it "
            "finish, or stop it with: "
            f"lastcall pause {catalog.root} --wait"
        ) from error


def _plan(catalog: Catalog, args: argparse.Namespace) -> PrunePlan:
    found = ls.survey(catalog.root, others=False)  # a script removes the checkpoints that it named itself
    valid = {item.path: item for item in found if item.status is ls.FolderStatus.VALID}
    entries = [Entry(item.path, item.record) for item in valid.values() if item.record is not None]
    keep = Keep(args.keep, args.monitor, args.mode)
    _check_monitor(entries, keep)
    going = {entry.path for entry in retention.superfluous(entries, keep)} if args.keep is not None else set()
    remove = [(valid[path], f"older than the newest {args.keep}") for path in valid if path in going]
    kept = [(valid[path], _why_kept(path, entries, keep)) for path in valid if path not in going]
    for item in found:
        if item.status is ls.FolderStatus.SET_ASIDE and args.damaged:
            remove.append((item, "damaged, and set aside"))
        elif item.path not in valid:
            kept.append((item, item.status.value))
    spare = sum(catalog.spares.sizes()) if args.spare else 0
    return PrunePlan(remove, kept, spare, spare + _space(item.path for item, _ in remove))


def _check_monitor(entries: list[Entry], keep: Keep) -> None:
    """A misspelt metric must not cost the best checkpoint."""
    if keep.monitor is not None and retention.best(entries, keep) is None:
        known = sorted({name for entry in entries for name in entry.record.metrics})
        there = f"they have {', '.join(known)}" if known else "they have no metrics at all"
        raise errors.LastcallError(f"--monitor {keep.monitor}: no checkpoint has this metric; {there}.")


def _why_kept(path: Path, entries: list[Entry], keep: Keep) -> str:
    best = retention.best(entries, keep)
    if best is not None and best.path == path:
        return f"the best by {keep.monitor}"
    if path in [entry.path for entry in entries if entry.record.complete][:2]:
        return "one of the last two complete checkpoints"
    return (
        "valid"
        if keep.limit is None
        else f"one of the newest {keep.limit}"
        if keep.limit > 1
        else "the newest"
    )


def _space(folders: Iterable[Path]) -> int:
    """The bytes freed on the disk: a file that a kept checkpoint also links to frees nothing."""
    seen: Counter[tuple[int, int]] = Counter()
    facts: dict[tuple[int, int], os.stat_result] = {}
    for folder in folders:
        for parent, _, names in os.walk(folder):
            for name in names:
                info = os.lstat(os.path.join(parent, name))
                seen[info.st_dev, info.st_ino] += 1
                facts[info.st_dev, info.st_ino] = info
    return sum(facts[key].st_blocks * 512 for key, count in seen.items() if count == facts[key].st_nlink)


def _carry_out(catalog: Catalog, plan: PrunePlan, *, spare: bool) -> list[str]:
    """Removes. Returns a sentence for each item that could not be removed."""
    failed = []
    for item, _ in plan.remove:
        try:
            _remove(catalog, item.path)
        except OSError as error:
            failed.append(f"{item.path.name} could not be removed: {error.strerror or error}")
    if spare:
        catalog.spares.clear()
        if left := sum(catalog.spares.sizes()):
            failed.append(f"{output.size(left)} of spare space could not be freed")
    return failed


def _remove(catalog: Catalog, path: Path) -> None:
    """Renamed out of the catalog first: a kill in the middle leaves garbage, which the next start removes,
    not half a checkpoint."""
    if not catalog.trash.is_dir():
        catalog.files.mkdir(catalog.trash)
    gone = storage.first_free(catalog.trash, (f"{path.name}-{n}" for n in range(10_000)))
    catalog.files.rename(path, gone)
    catalog.files.sync_directory(catalog.root)
    storage.remove_tree(catalog.files, gone)


def _report(plan: PrunePlan, root: Path, args: argparse.Namespace, failed: list[str]) -> None:
    if args.json:
        output.document(
            {
                "directory": os.path.abspath(root),
                "applied": args.apply,
                "remove": [{**ls.describe(item), "why": why} for item, why in plan.remove],
                "keep": [{**ls.describe(item), "why": why} for item, why in plan.keep],
                "spare": plan.spare,
                "frees": plan.frees,
                "failed": failed,
            }
        )
        return
    rows = [
        (action, item.path.name, output.size(item.size), why)
        for action, items in (("keep", plan.keep), ("remove", plan.remove))
        for item, why in items
    ]
    if plan.spare:
        rows.append(("remove", "spare space", output.size(plan.spare), "kept for the next save"))
    if rows:
        head = ("", "CHECKPOINT", "SIZE", "WHY")
        output.table(head, rows, right=("SIZE",), states=("",), folded={"WHY": 12})
    for sentence in failed:
        output.say(sentence)
    output.say(_verdict(plan, args, failed))


def _verdict(plan: PrunePlan, args: argparse.Namespace, failed: list[str]) -> str:
    if not plan.remove and not plan.spare:
        return "Nothing to remove."
    what = output.plural(len(plan.remove), "checkpoint") if plan.remove else "the spare space"
    if plan.remove and plan.spare:
        what += " and the spare space"
    if not args.apply:
        return (
            f"Would remove {what}, freeing {output.size(plan.frees)}. Nothing was removed; to remove it, add "
            "--apply"
        )
    return (
        f"Removed {what}, freeing {output.size(plan.frees)}."
        if not failed
        else "Not everything could be removed."
    )
