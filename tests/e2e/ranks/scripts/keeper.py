"""The store of torchrun's agent, and nothing else of it.

python keeper.py PORTFILE
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from torch.distributed import TCPStore

from helpers.ranks import plan as ranks_plan

ranks_plan.move()
store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
Path(sys.argv[1]).write_text(str(store.port))
print("ready", flush=True)
signal.pause()
