"""A training process as the launcher sees one, without torch: it joins the registry, counts steps, and saves
when it is told.

python launch_member.py DIRECTORY [--steps N] [--crash-at N] [--late FILE] [--hold FILE] [--bad] [--workers N]
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

from lastcall.core.process import registry

parser = argparse.ArgumentParser()
parser.add_argument("directory", type=Path)
parser.add_argument("--steps", type=int, default=1_000_000)
parser.add_argument("--crash-at", type=int, help="exit code 9 when this step would be done")
parser.add_argument("--late", type=Path, help="join when this file is there")
parser.add_argument("--hold", type=Path, help="the save takes until this file is there")
parser.add_argument("--bad", action="store_true", help="the save fails")
args = parser.parse_args()

told: list[int] = []


def hear(signum: int, frame: object) -> None:
    told.append(signum)
    print("heard", signal.Signals(signum).name, flush=True)


def leave(outcome: str, code: int) -> None:
    membership.update(step=step, outcome=outcome)
    print("left", outcome, flush=True)
    sys.exit(code)


print("started", os.getpid(), flush=True)
while args.late and not args.late.exists():
    time.sleep(0.01)
args.directory.mkdir(exist_ok=True)
(args.directory / ".lastcall").mkdir(exist_ok=True)
saved = args.directory / "saved"
step = int(saved.read_text()) if saved.exists() else 0
signal.signal(signal.SIGTERM, hear)
found = registry.Membership.of_environment(args.directory)
assert found is not None, "no launcher above"
membership = found
membership.update(step=step, resumed=step or None)
print("joined", step, flush=True)
while step < args.steps:
    time.sleep(0.01)
    if step + 1 == args.crash_at:
        leave("failed", 9)
    step += 1
    membership.update(step=step)
    notice = membership.notice()
    if notice is not None:
        print("notice", notice.source, notice.reason, flush=True)
    if notice is not None or told or (args.directory / ".lastcall" / "pause.json").exists():
        if args.bad:
            membership.update(step=step, outcome="not saved")
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        print("saving", flush=True)
        while args.hold and not args.hold.exists():
            time.sleep(0.01)
        saved.write_text(str(step))
        membership.update(step=step, checkpoint=f"checkpoint-{step}")
        leave("saved", int(os.environ.get("LASTCALL_EXIT_CODE", "75")))
leave("finished", 0)
