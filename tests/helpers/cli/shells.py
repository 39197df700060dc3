"""What completion must offer, in every shell: the same lines, typed into each of them."""

from __future__ import annotations

from pathlib import Path

import pytest

# line -> what is offered, and what is not
CASES: list[tuple[str, set[str], set[str]]] = [
    ("lastcall sh", {"show"}, {"ls"}),
    ("lastcall ", {"run", "ls", "kube", "completion"}, {"manifest", "--json"}),
    ("lastcall kube ", {"status", "pause", "inject"}, {"ls"}),
    ("lastcall kube pau", {"pause"}, {"status"}),
    ("lastcall ls ru", {"runs"}, {"rusty.txt"}),
    ("lastcall verify runs ru", {"runs"}, {"rusty.txt"}),
    ("lastcall ls --", {"--json", "--help"}, {"--once", "runs"}),
    ("lastcall watch runs --", {"--once", "--interval", "--json"}, {"--keep"}),
    ("lastcall kube status -", {"--namespace", "--json"}, {"--timeout"}),
    ("lastcall export runs rus", {"rusty.txt"}, {"run"}),
    ("lastcall export runs --format ", {"safetensors", "pt"}, {"--json"}),
    ("lastcall run --restart ", {"never", "on-preempt", "on-failure"}, {"runs"}),
    ("lastcall run --stop-file rus", {"rusty.txt"}, {"run"}),
    ("lastcall kube inject -f rus", {"rusty.txt"}, {"run"}),
    ("lastcall watch --interval 5 ru", {"runs"}, {"rusty.txt"}),
    ("lastcall completion ", {"bash", "zsh", "fish"}, {"runs"}),
    ("lastcall run --grace 5 -- basenam", {"basename"}, {"--json"}),
    ("lastcall run -- cat rus", {"rusty.txt"}, {"run"}),
    ("lastcall drill basenam", {"basename"}, {"--prove"}),
    ("lastcall doctor ru", {"runs"}, {"rusty.txt"}),
    ("lastcall doctor runs -- basenam", {"basename"}, {"--size"}),
]
each_case = pytest.mark.parametrize(("line", "offered", "others"), CASES, ids=[case[0] for case in CASES])


def folder(path: Path) -> Path:
    """With a folder and a file whose names begin alike."""
    (path / "runs").mkdir(parents=True)
    (path / "rusty.txt").touch()
    return path
