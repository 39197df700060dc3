"""Writes the checkpoints of the version of this checkout into tests/formats/VERSION, once for a released
version: what is there already is never replaced.

python tests/formats/make.py
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parents[1] / "src"))

import lastcall  # noqa: E402 - this checkout's, whichever one is installed

STOP = 9
PROGRAM = str(FOLDER / "program.py")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def ran(*command: str, code: int, **more: str) -> list[dict[str, object]]:
    env = {
        **os.environ,
        "PYTHONPATH": str(FOLDER.parents[1] / "src"),
        "LASTCALL_KILL_WAIT_SECONDS": "0",
        "LASTCALL_SPARE": "0",
        "OMP_NUM_THREADS": "1",
        **more,
    }
    done = subprocess.run([sys.executable, *command], env=env, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != code:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode} instead of {code}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def main() -> int:
    version = ".".join(lastcall.__version__.split(".")[:2])
    target = FOLDER / version
    if target.exists():
        raise SystemExit(f"{target} is there: the checkpoints of a released version are never made again")
    with tempfile.TemporaryDirectory(prefix="lastcall-formats-") as name:
        folder = Path(name)
        expected = {}
        for case, launcher, code in (("one-process", (), 75), ("two-ranks", TORCHRUN, 1)):
            expected[case] = ran(*launcher, PROGRAM, str(folder / "whole"), code=0, LASTCALL_ENABLED="0")
            run = folder / case
            ran(*launcher, PROGRAM, str(run), str(STOP), code=code)
            (checkpoint,) = run.glob("checkpoint-*")
            shutil.copytree(checkpoint, target / case / checkpoint.name)
    (target / "expected.json").write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
