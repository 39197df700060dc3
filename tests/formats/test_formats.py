"""Every checkpoint that a released version has written is read by this one (docs/compatibility.md)."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from helpers.processes.forkserver import ROOT, Nursery
from lastcall.cli import main as cli
from lastcall.core.checkpoint import record
from lastcall.formats import manifest

FOLDER = Path(__file__).parent
VERSIONS = sorted(path.name for path in FOLDER.iterdir() if (path / "expected.json").is_file())
STEP = 9


@pytest.mark.parametrize("case", ["one-process", "two-ranks"])
@pytest.mark.parametrize("version", VERSIONS)
def test_a_checkpoint_of_a_released_version_is_resumed_from(
    nursery: Nursery, tmp_path: Path, version: str, case: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(FOLDER / version / case, run)
    assert cli.main(["verify", str(run)]) == 0
    more = {"SHARDED": "1"} if case == "two-ranks" else {}
    child = nursery.run(tmp_path, FOLDER / "program.py", run, **more)
    assert child.code == 0, child.log()
    restored, *steps = map(json.loads, child.lines())
    expected = {
        said["step"]: said for said in json.loads((FOLDER / version / "expected.json").read_text())[case]
    }
    at = expected[STEP]
    assert restored == {
        "restored": STEP,
        **{key: at[key] for key in ("weights", "moments", "rate", "seen", "best", "names")},
    }
    assert [said["step"] for said in steps] == [10, 11, 12]
    if case == "one-process":  # another number of ranks cuts an epoch in another way
        for said in steps:
            assert (said["batch"], said["drawn"]) == (
                expected[said["step"]]["batch"],
                expected[said["step"]]["drawn"],
            )


def test_the_formats_of_this_version_have_checkpoints_here_and_a_row_in_the_policy() -> None:
    """A new format needs both before it can be released."""
    rows = re.findall(
        r"^\| (\d+) \| ([\d.]+)", (ROOT / "docs" / "compatibility.md").read_text(), re.MULTILINE
    )
    formats = {
        json.loads(path.read_text())["format"] for path in FOLDER.glob(f"*/*/checkpoint-*/{record.NAME}")
    }
    assert formats == {int(number) for number, _ in rows} == set(range(1, record.FORMAT + 1))
    assert {version for _, version in rows} <= set(VERSIONS)
    assert manifest.FORMAT == 1, "give the manifest's new format a checkpoint, too"


def test_nothing_of_the_machine_that_made_them_is_in_them() -> None:
    for path in FOLDER.glob("*/*/checkpoint-*/*.json"):
        assert not re.search(r'"/[\w./-]{1,120}"|localhost', path.read_text()), path
