"""What a save writes of buffers that a forward has changed since the boundary."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from helpers.models.roundtrip import read
from lastcall.adapters.torch.recorded_save.boundary_buffers import BoundaryBuffers
from lastcall.adapters.torch.recorded_save.recording import Recorder
from lastcall.adapters.torch.state import modules
from lastcall.adapters.torch.state.entries import StateSet
from lastcall.types import Capture, FileLayout


def bytes_of(layout: FileLayout) -> bytes:
    return b"".join(read(extent.source) for extent in layout.extents)


def mean(norm: torch.nn.BatchNorm1d) -> bytes:
    assert norm.running_mean is not None
    return norm.running_mean.numpy().tobytes()


def moved() -> tuple[torch.nn.BatchNorm1d, BoundaryBuffers, bytes]:
    """A model, its buffers as they were before a forward, and the bytes of one of them then."""
    norm = torch.nn.BatchNorm1d(5)
    small = StateSet({"models": [norm]}).small()
    before = mean(norm)
    norm(torch.rand(4, 5))
    return norm, BoundaryBuffers(modules.copied_buffers(small)), before


@pytest.mark.parametrize("form", ["pickle", "safetensors"])
def test_the_file_has_them_as_they_were_at_the_boundary(tmp_path: Path, form: str) -> None:
    norm, buffers, before = moved()
    with Recorder(tmp_path, buffers) as recorder:
        if form == "pickle":
            torch.save(norm.state_dict(), tmp_path / "model.bin")
        else:
            save_file(norm.state_dict(), tmp_path / "model.safetensors")
    (layout,) = recorder.files()
    assert before in bytes_of(layout)
    assert mean(norm) not in bytes_of(layout)
    judged = buffers.judged(Capture(1, {}, ()))
    assert judged.exact and judged.still()


def test_one_that_the_save_has_copied_itself_is_as_it_is_now_and_that_is_said(tmp_path: Path) -> None:
    norm, buffers, _ = moved()
    with Recorder(tmp_path, buffers):
        torch.save({name: value.clone() for name, value in norm.state_dict().items()}, tmp_path / "model.bin")
    judged = buffers.judged(Capture(1, {}, ()))
    assert not judged.exact and "buffers of the model have changed" in judged.because


def test_one_that_changes_while_the_file_is_written_makes_it_inexact_in_the_end(tmp_path: Path) -> None:
    norm = torch.nn.BatchNorm1d(5)
    buffers = BoundaryBuffers(modules.copied_buffers(StateSet({"model": norm}).small()))
    judged = buffers.judged(Capture(1, {}, ()))
    assert judged.exact and judged.still()
    norm(torch.rand(4, 5))
    assert not judged.still()
