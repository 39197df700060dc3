"""`lastcall pause` and `lastcall resume`: a file that a run looks for, `.lastcall/pause.json`.

While it exists, an active run saves and exits, and a run that starts waits without holding the directory.
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
from lastcall.cli import parser as parsers
from lastcall.core.checkpoint import catalog as catalogs
from lastcall.storage import files as storage

_POLL = 0.1  # seconds
_EXAMPLES = """examples:
  lastcall pause runs/exp1
  lastcall pause runs/exp1 --wait --timeout 120
"""
_RESUME_EXAMPLES = """examples:
  lastcall resume runs/exp1
"""
_JSON = {
    "directory": "the absolute path of the run",
    "paused": "true",
    "new": "whether this was the first request",
    "was_running": "whether a run was active",
    "left": "whether it has left by now",
    "outcome": "how it left: saved, finished, ..., or null",
    "checkpoint": "the checkpoint that it will resume from, or null",
}
_RESUME_JSON = {
    "directory": "the absolute path of the run",
    "paused": "false",
    "was_paused": "whether it was paused until now",
}


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "pause",
        description="Saves and stops a run. Even if it is started again, it waits until lastcall resume.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("directory", metavar="DIR", type=Path, help="the directory of a run")
    parser.add_argument(
        "--wait",
        action="store_true",
        help="wait until the run has saved and exited; exit with 1 if it did not save",
    )
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=parsers.seconds,
        help="with --wait: stop waiting after this many seconds (the pause stays)",
    )
    output.add_json(parser, _JSON)
    parser.set_defaults(call=run)
    parser = subparsers.add_parser(
        "resume",
        description="Resumes a paused run. A process that waits in the directory continues at once; if "
        "there is none, start the run again.",
        epilog=_RESUME_EXAMPLES,
    )
    parser.add_argument("directory", metavar="DIR", type=Path, help="the directory of a run")
    output.add_json(parser, _RESUME_JSON)
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
        said = _sentence(root, before, after, new=new, waited=args.wait, checkpoint=checkpoint)
        output.say(said, state="saved" if checkpoint else "WITHOUT saving" if failed else "paused")
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
        output.say(
            f"{root} is resumed: a process that waits there continues now; otherwise start the run again"
        )
    else:
        output.say(f"{root} was not paused")
    return 0


def _root(directory: Path) -> Path:
    root = ls.single(directory)
    if not (root / catalogs.PRIVATE).is_dir():
        raise errors.LastcallError(
            f"{root} is not the directory of a lastcall run: it has no {catalogs.PRIVATE} folder. "
            "Give the directory that was passed to protect()."
        )
    return root


def _ask(path: Path) -> bool:
    """Create the request. False if one exists already; it is left unchanged."""
    under = path.with_name(f"{path.name}.{storage.own_name()}.tmp")
    under.write_text(json.dumps({"at": time.time(), "by": _user()}) + "\n", encoding="utf-8")
    try:
        os.link(under, path)  # unlike a rename, this does not replace another user's request
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
    except (OSError, KeyError):  # in a container, a user ID without a name is common
        return str(os.getuid())


def _wait(watcher: watch.Watcher, before: watch.RunStatus, timeout: float | None) -> watch.RunStatus:
    """Waits until the process releases the directory, which it does after its last event."""
    give_up = None if timeout is None else time.monotonic() + timeout
    stops = watcher.story.stops
    while True:
        now = watcher.look()
        # Where no locks are visible, the last event has to serve.
        if not now.active or (now.held is not True and watcher.story.stops > stops):
            return now
        if now.paused is None:
            raise errors.LastcallError(
                f"the pause of {watcher.root} was withdrawn before the run exited: another user resumed it."
            )
        if give_up is not None and time.monotonic() >= give_up:
            return now
        time.sleep(_POLL)


def _checkpoint(status: watch.RunStatus) -> str | None:
    """What the run will resume from: a notice at a step that is already committed writes no new
    checkpoint."""
    name = status.last_save.get("path") if status.last_save is not None else status.resumed
    return name if isinstance(name, str) else None


def _sentence(
    root: Path,
    before: watch.RunStatus,
    after: watch.RunStatus,
    *,
    new: bool,
    waited: bool,
    checkpoint: str | None,
) -> str:
    again = f"To resume: lastcall resume {root}"
    if not before.active:
        return (
            f"{root} is paused{'' if new else ' already'}. No run is active in it; one that starts will "
            f"wait. {again}"
        )
    if not waited:
        asked = "is asked to save and stop" if new else "has already been asked to save and stop"
        return f"The run in {root} {asked}. Follow it with: lastcall watch {root}. {again}"
    if after.active:
        return (
            f"The run in {root} is still active. The pause stays in effect; the run will save and stop when "
            f"it can. {again}"
        )
    if after.outcome == "finished":
        return f"The run in {root} finished before it could be paused; its last checkpoint is {checkpoint}."
    if after.outcome == "saved":
        return f"The run in {root} has saved {checkpoint} and exited. {again}"
    because = after.failure.get("because") if after.failure is not None else None
    why = f" ({output.printable(str(because))})" if because else ""
    return f"The run in {root} exited WITHOUT saving: {after.outcome or 'outcome unknown'}{why}. {again}"
