"""What protect() refuses before anything is done."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lastcall
from lastcall import errors
from lastcall.settings import JITCheckpointConfig


def test_one_run_after_the_other_is_not_given_the_place_of_the_first(tmp_path: Path) -> None:
    """The second one found it full, and went on from the first one's checkpoint."""
    environ = {"LASTCALL_MIRROR": f"file://{tmp_path}/mirror"}
    for directory in ("a", "a", "./a"):
        lastcall.protect(
            tmp_path / directory, config=JITCheckpointConfig(environ=environ), model=torch.nn.Linear(1, 1)
        )
    with pytest.raises(
        errors.ConfigError,
        match="is the mirror of the run in .*/a, .* another one in .*/b: .*mirror='file://.*/mirror/b'",
    ):
        lastcall.protect(
            tmp_path / "b", config=JITCheckpointConfig(environ=environ), model=torch.nn.Linear(1, 1)
        )
    own = JITCheckpointConfig(mirror=f"file://{tmp_path}/mirror/b", environ=environ)
    lastcall.protect(tmp_path / "b", config=own, model=torch.nn.Linear(1, 1))
    assert not (tmp_path / "b").exists()
