"""`lastcall pause` and `lastcall resume`: a file that a run looks for, `.lastcall/pause.json`.

While it is there, a run that is at work saves and leaves, and one that starts waits, without holding the directory.
"""

from __future__ import annotations

import argparse
import getpass
import json
import os
import time
from pathlib import Path
from typing import Any

from lastcall import errors
from lastcall.cli import ls, output, watch
from lastcall.core.checkpoint import catalog as catalogs
from lastcall.storage import files as storage

_POLL = 0.1  # seconds


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "pause",
        help="have a run save, stop, and stay stopped",
        description="Have a run save and stop. It stays stopped until lastcall resume, whoever starts it again.",
    )
    parser.add_argument("directory", metavar="DIR", type=Path, help="the directory of a run")
    parser.add_argument("--wait", action="store_true", help="wait until the run has saved and left; exit code 1 if it has not saved")
    parser.add_argument("--timeout", metavar="SECONDS", type=float, help="with --wait: give up waiting after so long (the pause stays)")
    output.add_json(parser)
    parser.set_defaults(call=run)
    parser = subparsers.add_parser("resume", help="let a paused run go on", description="Let a paused run go on.")
    parser.add_argument("directory", metavar="DIR", type=Path, help="the directory of a run")
    output.add_json(parser)
    parser.set_defaults(call=resume)


def run(args: argparse.Namespace) -> int:
    root = _root(args.directory)
    watcher = watch.Watcher(root)
    before = watcher.look()
    new = _ask(watcher.private / watch.PAUSE)
    after = _wait(watcher, before, args.timeout) if args.wait and before.active else before
    left = not after.active
    saved = before.active and left and after.outcome in ("saved", "finished")
    checkpoint = _checkpoint(after) if saved else None
    failed = args.wait and before.active and not saved
    if args.json:
        output.document(
            {
                "directory": os.path.abspath(root),
                "paused": True,
                "new": new,
                "was_running": before.active,
                "left": left,
                "outcome": after.outcome if before.active and left else None,
                "checkpoint": checkpoint,
            }
        )
    else:
        output.write(_sentence(root, before, after, new=new, waited=args.wait, checkpoint=checkpoint))
    return 1 if failed else 0


def resume(args: argparse.Namespace) -> int:
    root = _root(args.directory)
    path = root / catalogs.PRIVATE / watch.PAUSE
    try:
        path.unlink()
        was_paused = True
    except FileNotFoundError:
        was_paused = False
    if args.json:
        output.document({"directory": os.path.abspath(root), "paused": False, "was_paused": was_paused})
    elif was_paused:
        output.write(f"{root} may go on: a process that waits there does so now; otherwise start the run again")
    else:
        output.write(f"{root} was not paused")
    return 0


def _root(directory: Path) -> Path:
    root = ls.single(directory)
    if not (root / catalogs.PRIVATE).is_dir():
        raise errors.LastcallError(f"{root} is not the directory of a run of lastcall: it has no {catalogs.PRIVATE} folder.")
    return root


def _ask(path: Path) -> bool:
    """Put the request there. False if there was one already: it stays as it is."""
    under = path.with_name(f"{path.name}.{storage.own_name()}.tmp")
    under.write_text(json.dumps({"at": time.time(), "by": _user()}) + "\n", encoding="utf-8")
    try:
        os.link(under, path)  # unlike a rename, it does not replace the request of somebody else
        return True
    except FileExistsError:
        return False
    except OSError:  # a file system without links
        there = path.exists()
        os.replace(under, path)
        return not there
    finally:
        under.unlink(missing_ok=True)


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # in a container, a number without a name is common
        return str(os.getuid())


def _wait(watcher: watch.Watcher, before: watch.Status, timeout: float | None) -> watch.Status:
    """Until the process has let go of the directory, which it does after its last word in the events."""
    give_up = None if timeout is None else time.monotonic() + timeout
    stops = watcher.story.stops
    while True:
        now = watcher.look()
        # Where there are no locks to be seen, the last word has to do.
        if not now.active or (now.held is not True and watcher.story.stops > stops):
            return now
        if now.paused is None:
            raise errors.LastcallError(f"the pause of {watcher.root} was taken back before the run had left: somebody has resumed it.")
        if give_up is not None and time.monotonic() >= give_up:
            return now
        time.sleep(_POLL)


def _checkpoint(status: watch.Status) -> str | None:
    """What the run goes on from: a notice that finds its step committed already makes no new one."""
    name = status.last_save.get("path") if status.last_save is not None else status.resumed
    return name if isinstance(name, str) else None


def _sentence(root: Path, before: watch.Status, after: watch.Status, *, new: bool, waited: bool, checkpoint: str | None) -> str:
    again = f"It goes on after: lastcall resume {root}"
    if not before.active:
        return f"{root} is paused{'' if new else ' already'}. No run is at work in it; one that starts will wait. {again}"
    if not waited:
        asked = "is asked to save and stop" if new else "has been asked already to save and stop"
        return f"The run in {root} {asked}. See how it does with: lastcall watch {root}. {again}"
    if after.active:
        return f"The run in {root} is still there. The pause stays, and it will save and stop when it can. {again}"
    if after.outcome == "finished":
        return f"The run in {root} finished before it could be paused; its last checkpoint is {checkpoint}."
    if after.outcome == "saved":
        return f"The run in {root} has saved {checkpoint} and left. {again}"
    because = after.failure.get("because") if after.failure is not None else None
    why = f" ({output.printable(str(because))})" if because else ""
    return f"The run in {root} has left WITHOUT saving: {after.outcome or 'no word of how it ended'}{why}. {again}"
