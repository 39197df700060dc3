from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from lastcall.dcp import Reader, Writer

pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)


def test_tensors_on_the_device_are_saved_after_the_work_that_makes_them_and_loaded_in_place(
    tmp_path: Path,
) -> None:
    state: dict[str, Any] = {
        "w": torch.zeros(3_000_000, device="cuda"),
        "t": torch.arange(12.0, device="cuda").reshape(3, 4).T,
        "host": torch.ones(5),
    }
    torch.cuda._sleep(200_000_000)
    state["w"].fill_(2.0)
    dcp.save(state, storage_writer=Writer(tmp_path / "c"), no_dist=True)
    found = {name: torch.zeros_like(value) for name, value in state.items()} | {
        "t": torch.zeros(4, 3, device="cuda").bfloat16()
    }
    dcp.load(found, storage_reader=Reader(tmp_path / "c"), no_dist=True)
    assert torch.equal(found["w"], torch.full_like(found["w"], 2.0)) and found["w"].is_cuda
    assert torch.equal(found["t"].float(), state["t"]) and torch.equal(found["host"], state["host"])
