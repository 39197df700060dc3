"""What the tests of the commands share besides fixtures."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HOLD = """
    import time
    from pathlib import Path
    from lastcall import clock
    from lastcall.core.checkpoint.catalog import Catalog
    from lastcall.storage import files

    Catalog(Path({root!r}), files.Files()).open(clock.Clock())
    print("held")
    time.sleep(600)
"""  # a process that holds the directory, as a run does


@dataclass(frozen=True)
class Said:
    """What a command said, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


Cli = Callable[..., Said]
MakeRun = Callable[..., Path]
