"""The benchmarks run and print what they promise. No number is judged here: this machine is busy with the
other tests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)


def small(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return bench(*arguments, "--size", "0.02", "--rounds", "1", "--dir", str(folder))


@pytest.mark.parametrize(
    "name", ["save", *(pytest.param(name, marks=pytest.mark.slow) for name in ("small", "frozen"))]
)
def test_a_save_table_has_the_limit_the_peers_and_lastcall_and_says_how_they_compare(
    name: str, tmp_path: Path
) -> None:
    done = small(tmp_path, name, "--without", "dcp", "--json", str(tmp_path / "all.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    for said in (
        "kernel",
        "x raw limit",
        "raw buffered + fsync",
        "torch.save + fsync",
        "safetensors",
        "lastcall is ",
    ):
        assert said in done.stdout
    assert "DCP" not in done.stdout
    (report,) = json.loads((tmp_path / "all.json").read_text())["reports"]
    assert {"limit", "lastcall", "peer"} <= {method["kind"] for method in report["methods"]}
    assert all(method["samples"] for method in report["methods"] if method["kind"] != "limit")


@pytest.mark.slow
def test_dcp_is_measured_and_shown_once_with_its_best_number_of_threads(tmp_path: Path) -> None:
    done = small(tmp_path, "save", "--without", "lastcall", "--without", "raw")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("DCP save, ") == 1
    assert all(f"DCP save, {threads}" in done.stderr for threads in ("1 thread:", "2 threads:", "4 threads:"))


@pytest.mark.slow
def test_a_stall_table_compares_with_memcpy(tmp_path: Path) -> None:
    done = small(tmp_path, "stall")
    assert done.returncode == 0, done.stdout + done.stderr
    for said in ("x plain memcpy", "memcpy, one thread", "DCP async_save, cached stager", "lastcall is "):
        assert said in done.stdout


def test_a_resume_table_compares_with_the_raw_read_and_every_byte_comes_back(tmp_path: Path) -> None:
    done = small(tmp_path, "resume")
    assert done.returncode == 0, done.stdout + done.stderr
    for said in (
        "raw O_DIRECT read",
        "torch.load(mmap=True) + copy",
        "DCP load",
        "lastcall is ",
        "every byte",
    ):
        assert said in done.stdout


def test_the_start_of_a_python_process_is_listed_with_its_control(tmp_path: Path) -> None:
    done = small(tmp_path, "startup")
    assert done.returncode == 0, done.stdout + done.stderr
    for said in ("control: bare against bare", "lastcall: lastcall run"):
        assert said in done.stdout


@pytest.mark.slow
def test_the_webhook_is_asked_at_a_fixed_rate_and_as_fast_as_it_goes(tmp_path: Path) -> None:
    done = small(tmp_path, "kube-webhook")
    assert done.returncode == 0, done.stdout + done.stderr
    for said in ("200 requests a second: median", "99th percentile", "as fast as they go", "with annotation"):
        assert said in done.stdout


def test_the_cost_of_a_step_is_listed_with_its_control(tmp_path: Path) -> None:
    done = small(tmp_path, "step")
    assert done.returncode == 0, done.stdout + done.stderr
    for said in ("control: bare against bare", "run.steps and hooks", "copy of small state"):
        assert said in done.stdout


@pytest.mark.slow
def test_sharded_saves_stand_beside_dcp_and_the_raw_limit(tmp_path: Path) -> None:
    without = [part for name in ("2 threads", "4 threads", "new space") for part in ("--without", name)]
    done = small(tmp_path, "ranks-save", *without)
    assert done.returncode == 0, done.stdout + done.stderr
    for said in (
        "FSDP2 on 2 ranks",
        "raw O_DIRECT",
        "FileSystemWriter, 1 thread",
        "lastcall.dcp.Writer",
        "lastcall is ",
    ):
        assert said in done.stdout
    assert "not measured" not in done.stdout


@pytest.mark.slow
def test_sharded_loads_bring_back_every_byte_on_every_rank(tmp_path: Path) -> None:
    done = small(tmp_path, "ranks-load", "--without", "2 threads")
    assert done.returncode == 0, done.stdout + done.stderr
    for said in ("FSDP2 on 2 ranks", "FileSystemReader", "lastcall.dcp.Reader", "every byte", "lastcall is "):
        assert said in done.stdout
    assert "not measured" not in done.stdout


@pytest.mark.slow
def test_the_cost_of_a_step_on_two_ranks_is_listed_beside_what_others_add(tmp_path: Path) -> None:
    done = small(tmp_path, "ranks-step")
    assert done.returncode == 0, done.stdout + done.stderr
    for said in (
        "bare DDP step",
        "all-reduce of one flag",
        "Ray's barrier",
        "run.steps and hooks",
        "0.1 % at most",
    ):
        assert said in done.stdout


@pytest.mark.slow
def test_the_way_from_a_signal_to_a_checkpoint_of_all_ranks_is_listed(tmp_path: Path) -> None:
    done = small(tmp_path, "notice-ranks")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the save itself" in done.stdout and "not measured" not in done.stdout


@pytest.mark.slow
def test_markdown_is_a_table_for_the_readme(tmp_path: Path) -> None:
    done = small(tmp_path, "save", "--markdown", "--without", "lastcall", "--without", "dcp")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "|---|---:|" in done.stdout
    assert "| torch.save + fsync |" in done.stdout


def test_nothing_is_left_behind_neither_by_us_nor_by_a_benchmark_that_was_killed(tmp_path: Path) -> None:
    killed = tmp_path / "lastcall-bench-999999999"
    killed.mkdir()
    (killed / "raw.bin").write_bytes(b"left")
    other = tmp_path / "lastcall-bench-notes"
    other.mkdir()
    done = small(tmp_path, "save", "--without", "lastcall", "--without", "dcp", "--without", "raw")
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == [other]


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    script = (
        "import sys, collections, bench.disk as disk, bench.__main__ as main\n"
        "usage = collections.namedtuple('usage', 'total used free')\n"
        "disk.shutil.disk_usage = lambda folder: usage(10**9, 10**9, 10**6)\n"
        f"sys.exit(main.main(['save', '--size', '0.02', '--dir', {str(tmp_path)!r}]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "GB free" in done.stderr and "--dir" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_without_a_name_everything_is_measured(tmp_path: Path) -> None:
    done = small(
        tmp_path,
        *(
            part
            for name in ("lastcall", "dcp", "raw", "torch.save", "Transformers", "Trainer")
            for part in ("--without", name)
        ),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for title in (
        "Save: ",
        "many small",
        "frozen",
        "Stall",
        "Resume",
        "Cost of a step",
        "from a GPU|from NVIDIA",
    ):
        assert any(word in done.stdout for word in title.split("|"))


@pytest.mark.parametrize("wrong", [["--rounds", "0"], ["nonsense"]])
def test_wrong_arguments_are_refused(wrong: list[str]) -> None:
    done = bench(*wrong)
    assert done.returncode == 2
    assert f"not {wrong[-1]}" in done.stderr or f"invalid choice: {wrong[-1]!r}" in done.stderr
