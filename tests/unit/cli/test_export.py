from __future__ import annotations

import os
import pty
import stat
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import lastcall
from helpers.cli.harness import Cli, MakeRun
from helpers.core import forging
from helpers.core.bare_core import SIZES, flip, header_of, noise
from helpers.processes.forkserver import environment
from lastcall.cli import export
from lastcall.core.engine import writer
from lastcall.storage import files as storage


def whole(tmp_path: Path, **more: Any) -> Path:
    return forging.commit(tmp_path / "run" / "checkpoint-1", forging.two_ranks(), world=2, **more)


WHOLE = {
    "w": torch.arange(8.0).reshape(2, 4),
    "b": torch.tensor([8.0, 9.0]),
    "none": torch.empty(0, 3),
    "mean": torch.tensor([10.0]),
}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_is_exported_from_its_newest_checkpoint(cli: Cli, make_run: MakeRun, tmp_path: Path) -> None:
    root, out = make_run("run", 1, 2), tmp_path / "all.safetensors"
    said = cli("export", root, out)
    assert (said.code, said.err) == (0, "")
    assert said.out.startswith(f"{out}: 6 tensors, ") and said.out.rstrip().endswith(
        f"from {root}/checkpoint-2"
    )
    assert {name: found.shape[0] for name, found in header_of(out).items()} == {
        f"{group}.{name}": size for group, names in SIZES.items() for name, size in names.items()
    }
    with safe_open(out, "pt") as opened:
        assert opened.get_tensor("model.w").numpy().tobytes() == noise(20_000, "model w 1002")
    assert sorted(os.listdir(tmp_path)) == ["all.safetensors", "run"]


def test_the_checkpoint_that_is_named_is_exported_and_json_says_what_was_done(
    cli: Cli, make_run: MakeRun, tmp_path: Path
) -> None:
    root, out = make_run("run", 1, 2), tmp_path / "m.safetensors"
    said = cli("export", root / "checkpoint-1", out, "--name", "model", "--json").json
    assert said["checkpoint"] == str(root / "checkpoint-1") and said["out"] == str(out)
    assert (said["format"], said["name"], said["tensors"], said["size"]) == (
        "safetensors",
        "model",
        3,
        out.stat().st_size,
    )
    with safe_open(out, "pt") as opened:
        assert set(opened.keys()) == {"w", "b", "none"}
        assert opened.get_tensor("w").numpy().tobytes() == noise(20_000, "model w 1001")


def test_the_pieces_of_many_ranks_become_whole_and_own_tensors_are_rank_0s(cli: Cli, tmp_path: Path) -> None:
    checkpoint = whole(tmp_path)
    assert cli("export", checkpoint, tmp_path / "m.safetensors", "--name", "model").code == 0
    assert same(load_file(tmp_path / "m.safetensors"), WHOLE)
    assert cli("export", checkpoint, tmp_path / "m.pt", "--name", "model").code == 0
    assert same(torch.load(tmp_path / "m.pt", weights_only=True), WHOLE)


@pytest.mark.parametrize("out", ["x.pt", "x.pth", "x.bin", "x"])
def test_a_pt_file_is_a_sound_zip_that_torch_opens(cli: Cli, tmp_path: Path, out: str) -> None:
    more = () if Path(out).suffix else ("--format", "pt")
    assert cli("export", whole(tmp_path), tmp_path / out, *more).code == 0
    with zipfile.ZipFile(tmp_path / out) as archive:
        assert archive.testzip() is None
    each: tuple[dict[str, Any], ...] = ({}, {"mmap": True})
    for options in each:
        found = torch.load(tmp_path / out, weights_only=True, **options)
        assert same(found, {f"model.{name}": tensor for name, tensor in WHOLE.items()})


def test_a_model_of_protect_comes_out_as_its_state_dict_with_frozen_and_tied_weights(
    cli: Cli, tmp_path: Path
) -> None:
    model = torch.nn.Sequential(
        torch.nn.Embedding(5, 3), torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 5)
    )
    model[3].weight = model[0].weight
    model[1].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    with lastcall.protect(tmp_path / "run", model=model, optimizer=optimizer) as run:
        for _ in run.steps(1):
            model[1:](model[0](torch.arange(5))).sum().backward()
            optimizer.step()
        run.save()
    for out, load in (("m.safetensors", load_file), ("m.pt", torch.load)):
        assert cli("export", tmp_path / "run", tmp_path / out, "--name", "model").code == 0
        state = load(tmp_path / out)
        assert same(state, dict(model.state_dict()))
        model.load_state_dict(state)
    assert cli("export", tmp_path / "run", tmp_path / "all.safetensors").code == 0
    assert {"model.3.weight", "model.1.weight"} <= load_file(tmp_path / "all.safetensors").keys()
    assert any(name.startswith("optimizer.") for name in load_file(tmp_path / "all.safetensors"))


def test_nothing_is_replaced_without_force(cli: Cli, tmp_path: Path) -> None:
    checkpoint, out = whole(tmp_path), tmp_path / "x.safetensors"
    out.write_text("mine")
    said = cli("export", checkpoint, out)
    assert (said.code, "--force" in said.err, out.read_text()) == (1, True, "mine")
    assert cli("export", checkpoint, out, "--force").code == 0
    assert len(load_file(out)) == 4
    assert stat.S_IMODE(out.stat().st_mode) == 0o666 & ~_umask()


def _umask() -> int:
    value = os.umask(0)
    os.umask(value)
    return value


def test_a_file_that_appears_meanwhile_is_not_replaced_either(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, out = whole(tmp_path), tmp_path / "x.safetensors"
    real = export._fill

    def fill(*args: Any) -> int:
        out.write_text("mine")
        return real(*args)

    monkeypatch.setattr(export, "_fill", fill)
    said = cli("export", checkpoint, out)
    assert (said.code, "in the meantime" in said.err, out.read_text()) == (1, True, "mine")
    assert sorted(os.listdir(tmp_path)) == ["run", "x.safetensors"]


def test_a_file_system_without_links_will_do(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: object, old: Path, new: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(storage.Files, "link", refuse)
    assert cli("export", whole(tmp_path), tmp_path / "x.safetensors").code == 0
    assert sorted(os.listdir(tmp_path)) == ["run", "x.safetensors"]


def test_wrong_targets_and_sources_say_what_to_do(cli: Cli, make_run: MakeRun, tmp_path: Path) -> None:
    root = make_run("run", 1)
    assert "is a directory" in cli("export", root, tmp_path).err
    assert "mkdir -p" in cli("export", root, tmp_path / "no" / "x.safetensors").err
    assert "does not exist" in cli("export", tmp_path / "nope", tmp_path / "x").err
    assert "does not exist" in cli("export", root / "checkpoint-7", tmp_path / "x").err
    said = cli("export", root, tmp_path / "x", "--name", "modle")
    assert (said.code, "It has: base, model, optimizer" in said.err) == (1, True)
    (root / "checkpoint-9").mkdir()
    assert "another program wrote it" in cli("export", root / "checkpoint-9", tmp_path / "x").err
    assert os.listdir(tmp_path) == ["run"]


def test_of_a_partial_checkpoint_only_what_is_there_can_be_named(cli: Cli, tmp_path: Path) -> None:
    checkpoint = whole(tmp_path, missing=("optimizer-00001.safetensors",))
    said = cli("export", checkpoint, tmp_path / "x")
    assert (said.code, "optimizer-00001.safetensors" in said.err, "--name: model" in said.err) == (
        1,
        True,
        True,
    )
    assert "is partial" in cli("export", checkpoint, tmp_path / "x", "--name", "optimizer").err
    assert cli("export", checkpoint, tmp_path / "x", "--name", "model").code == 0


def test_a_damaged_byte_leaves_no_file_behind(cli: Cli, make_run: MakeRun, tmp_path: Path) -> None:
    root = make_run("run", 1)
    flip(root / "checkpoint-1" / "model.safetensors", -1)
    said = cli("export", root, tmp_path / "x")
    assert (said.code, "model.safetensors: the bytes" in said.err) == (1, True)
    assert os.listdir(tmp_path) == ["run"]
    assert cli("export", root, tmp_path / "x", "--name", "optimizer").code == 0


@pytest.mark.parametrize("case", forging.HOSTILE)
def test_a_hostile_manifest_is_refused(cli: Cli, tmp_path: Path, case: str) -> None:
    change, words = forging.HOSTILE[case]
    files = forging.two_ranks()
    change(files)
    forging.commit(tmp_path / "c", files, world=2)
    said = cli("export", tmp_path / "c", tmp_path / "x")
    assert (said.code, words in said.err) == (1, True), said.err
    assert os.listdir(tmp_path) == ["c"]


def test_a_name_that_safetensors_keeps_for_itself_fits_into_a_pt(cli: Cli, tmp_path: Path) -> None:
    pytest.importorskip("torch.distributed.checkpoint")
    data = forging.tensor_file({"x": ("F32", (1,), forging.floats(1))})
    node = b'{"state": {"m": {"tensors": [["__metadata__", {"g": "m", "n": "x"}]]}}}'
    forging.commit(tmp_path / "c", {"state.json": node, "m.safetensors": data})
    said = cli("export", tmp_path / "c", tmp_path / "x.safetensors", "--name", "m")
    assert (said.code, "--format pt" in said.err) == (1, True)
    assert cli("export", tmp_path / "c", tmp_path / "x.pt", "--name", "m").code == 0
    assert set(torch.load(tmp_path / "x.pt")) == {"x", "__metadata__"}


def test_memory_stays_small_however_large_a_tensor_is(tmp_path: Path) -> None:
    size = 160_000_000
    with (tmp_path / "big").open("wb") as file:
        file.truncate(size)
    data = forging.tensor_file({"x": ("U8", (size,), (tmp_path / "big").read_bytes())})
    forging.commit(tmp_path / "c", {"state.json": b"{}", "m.safetensors": data})
    del data
    source = f"""
from lastcall.cli.main import main
assert main(["export", {str(tmp_path / "c")!r}, {str(tmp_path / "x")!r}, "--format", "pt"]) == 0
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
assert int(peak.split()[1]) * 1024 < 140_000_000, peak
"""
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, env=environment(), timeout=90
    )
    assert done.returncode == 0, done.stderr


def test_it_works_where_torch_and_numpy_are_not_installed_and_draws_a_bar_on_a_terminal(
    make_run: MakeRun, tmp_path: Path
) -> None:
    root = make_run("run", 1)
    source = f"""
import sys
for name in ("torch", "numpy", "safetensors"):
    sys.modules[name] = None
from lastcall.cli.main import main
for out in ("x.safetensors", "x.pt"):
    assert main(["export", {str(root)!r}, {str(tmp_path)!r} + "/" + out]) == 0
"""
    ours, theirs = pty.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-c", source],
            stdout=subprocess.PIPE,
            stderr=theirs,
            env=environment(),
            timeout=90,
        )
        os.write(theirs, b"END")
        drawn = b""
        while not drawn.endswith(b"END"):
            drawn += os.read(ours, 10_000)
    finally:
        os.close(ours)
        os.close(theirs)
    assert done.returncode == 0, drawn
    assert b"\r[" in drawn
    assert torch.load(tmp_path / "x.pt")["model.w"].numpy().tobytes() == noise(20_000, "model w 1001")


def test_chunks_of_any_size_are_put_together(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor by columns whose runs are cut by the chunks of the files."""
    monkeypatch.setattr(writer, "CHUNK", 4096)
    values = torch.arange(3000 * 6, dtype=torch.float32).reshape(3000, 6)
    files = forging.two_ranks()
    for rank in (0, 1):
        part = values[:, 3 * rank : 3 * rank + 3].contiguous().numpy().tobytes()
        files[f"model-0000{rank}.safetensors"] = forging.tensor_file(
            {f"w@0,{3 * rank}": ("F32", (3000, 3), part)}
        )
    pieces = ",".join(
        f'{{"file": "model-0000{rank}.safetensors", "key": "w@0,{3 * rank}", "offset": [0, {3 * rank}], '
        f'"shape": [3000, 3]}}'
        for rank in (0, 1)
    )
    text = (
        f'{{"format": 1, "tensors": {{"model": {{"w": {{"dtype": "F32", "shape": [3000, 6], "pieces": '
        f"[{pieces}]}}}}}}}}"
    )
    files["manifest.json"] = text.encode()
    forging.commit(tmp_path / "c", files, world=2)
    assert cli("export", tmp_path / "c", tmp_path / "x.safetensors", "--name", "model").code == 0
    assert torch.equal(load_file(tmp_path / "x.safetensors")["w"], values)
