"""A model that is sharded over the ranks by FSDP2 is saved by all of them together, in Hugging Face's own FSDP format, at the agreed
step; and a run that was interrupted ends with the very bits of one that was not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers import trainer_chain
from helpers.nursery import Nursery

SHARDED = {"fsdp": True, "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}
FULL = {"fsdp": True, "fsdp_config": {"state_dict_type": "FULL_STATE_DICT"}}


@pytest.fixture
def nursery(trainers: Nursery) -> Any:
    yield trainers
    trainers.clear()


def test_sharded_checkpoints_leave_no_trace(nursery: Nursery, tmp_path: Path) -> None:
    trainer_chain.compare(nursery, tmp_path, "bits_sharded.py", SHARDED, ranks=2, count=2)


@pytest.mark.slow
def test_full_checkpoints_leave_no_trace(nursery: Nursery, tmp_path: Path) -> None:
    trainer_chain.compare(nursery, tmp_path, "bits_sharded.py", FULL, ranks=2, count=2)
