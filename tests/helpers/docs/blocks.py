"""The code blocks of a page, what is to become of each, and a shell that runs them.

A block stands behind an HTML comment of its own:

    <!-- run -->                      bash runs it, in order, in one empty folder a page; its exit code is 0
    <!-- run: 75 -->                  ... or this
    <!-- run, wait for PATH -->       ... and then this file is waited for (of a process in the background)
    <!-- file: train.py -->           it is written to this file of that folder
    <!-- runs: tests/x.py::test_y --> this test runs it, or shows that it works
    <!-- output -->                   what a program prints (test_quoted_lines.py looks for its sentences)
    <!-- not run: why -->             it cannot be run here

`<!-- every block runs: tests/x.py -->` anywhere in a page is the mark of all its blocks that have none.
"""

from __future__ import annotations

import re
import subprocess
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from helpers.processes.forkserver import ROOT, environment, until

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
_MARK = re.compile(r"<!-- (run|runs|file|output|not run)\b(?:: | |, )?(.*?) ?-->")


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str  # "" of an indented block
    text: str
    mark: str  # "" where it has none
    value: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def commands(self) -> str:
        """What a user types: lines behind a `$ `, if there are any; otherwise all of it."""
        typed = [line[2:] for line in self.text.splitlines() if line.startswith("$ ")]
        return "\n".join(typed) if typed else self.text


def blocks(page: Path) -> Iterator[Block]:
    """Fenced blocks, and those that are indented by four behind an empty line or a heading."""
    text = page.read_text(encoding="utf-8")
    whole = re.search(r"<!-- every block (runs): (\S+) -->", text)
    unmarked = (whole[1], whole[2]) if whole else ("", "")
    lines, mark, number = text.splitlines(), unmarked, 0
    while number < len(lines):
        line, begin = lines[number], number
        if found := _MARK.fullmatch(line):
            mark = (found[1], found[2])
        elif fence := re.match(r"```(\w*)", line):
            number = next(end for end in range(begin + 1, len(lines)) if lines[end].startswith("```"))
            yield Block(page, begin + 1, fence[1] or "text", "\n".join(lines[begin + 1 : number]), *mark)
            mark = unmarked
        elif line.startswith("    ") and (not begin or re.match(r"\s*$|#+ ", lines[begin - 1])):
            while number + 1 < len(lines) and re.match(r"    |\s*$", lines[number + 1]):
                number += 1
            text = textwrap.dedent("\n".join(lines[begin : number + 1])).strip("\n")
            yield Block(page, begin + 1, "", text, *mark)
            mark = unmarked
        elif line.strip():
            mark = unmarked
        number += 1


class Shell:
    """One bash, in which the blocks of a page run one after another."""

    def __init__(self, folder: Path, programs: Path) -> None:
        self._folder = folder
        self._said = folder.parent / f"{folder.name}.said"
        env = environment()
        del env["PYTHONPATH"]
        env["PATH"] = f"{programs}:{env['PATH']}"
        with self._said.open("wb") as said:
            self._bash = subprocess.Popen(
                ["bash", "--noprofile", "--norc"],
                cwd=folder,
                env=env,
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        self._count = 0

    def run(self, block: Block) -> None:
        if block.mark == "file":
            (self._folder / block.value).write_text(block.text + "\n")
            return
        code, _, awaited = block.value.partition("wait for ")
        self._count += 1
        end = f"[block {self._count}: "
        assert self._bash.stdin is not None
        self._bash.stdin.write(f'{block.commands}\necho "{end}$?]"\n')
        self._bash.stdin.flush()
        until(lambda: end in self.said() or self._bash.poll() is not None, f"{block.where}: {self.said()}")
        found = re.search(re.escape(end) + r"(\d+)\]", self.said())
        assert found and found[1] == (code.strip(", ") or "0"), f"{block.where}: {self.said()}"
        if awaited:
            path = self._folder / awaited
            until(path.exists, f"{block.where}: no {awaited}: {self.said()}")

    def said(self) -> str:
        return self._said.read_text(errors="replace")

    def close(self) -> None:
        assert self._bash.stdin is not None
        self._bash.stdin.close()
        self._bash.wait(30)


def run(page: Path, folder: Path, programs: Path) -> str:
    """Run a page in this folder; what its commands said. `programs`: where `python` and `lastcall` are."""
    shell = Shell(folder, programs)
    try:
        for block in blocks(page):
            if block.mark in ("run", "file"):
                shell.run(block)
    finally:
        shell.close()
    return shell.said()
