"""PyTorch's distributed checkpoint, in lastcall's format and at its speed: a storage writer and reader for
`dcp.save` and `dcp.load`.

import torch.distributed.checkpoint as dcp
from lastcall.dcp import Reader, Writer

dcp.save(state_dict, storage_writer=Writer("checkpoints/step-1000"))
dcp.load(state_dict, storage_reader=Reader("checkpoints/step-1000"))
"""

from __future__ import annotations

from lastcall import installing

try:
    from lastcall.adapters.torch.dcp.reader import Reader, to_torch_save
    from lastcall.adapters.torch.dcp.writer import Writer
except ModuleNotFoundError as error:
    if error.name not in ("torch", "numpy"):
        raise
    raise ImportError(installing.missing("lastcall.dcp", error.name, "torch")) from error

__all__ = ["Reader", "Writer", "to_torch_save"]
