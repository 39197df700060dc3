"""The outline of a shell script: its statements, and what joins them. A script is read, never run."""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

TRAINS = re.compile(
    r"(python|pypy)[\d.]*|torchrun|accelerate|deepspeed|lastcall|lightning|composer|mpirun|mpiexec|srun|\$@|\$\*|\$\{@\}"
)
_OPENERS = frozenset(
    {"then", "else", "do", "{", "time", "command", "nohup"}
)  # words that may precede a command and change nothing here
_CONDITIONS = frozenset({"if", "elif", "while", "until", "!", "for", "case", "select"})
_CLOSERS = frozenset({"fi", "done", "esac", "}"})
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=.*", re.DOTALL)


@dataclass(frozen=True)
class ShellCommand:
    """A command, without assignments and redirections."""

    words: tuple[str, ...]
    line: int
    joined: str  # what comes after it: "|", "||", "&&", "&", or ";" for everything else
    conditional: bool = False

    @property
    def program(self) -> tuple[str, ...]:
        return self.words[1:] if self.words[:1] == ("exec",) else self.words

    @property
    def trains(self) -> bool:
        words = self.program
        name = os.path.basename(words[0]) if words else ""
        return TRAINS.fullmatch(name) is not None and (name != "lastcall" or words[1:2] == ("run",))


def read(text: str) -> Iterator[ShellCommand]:
    """The statements of a script, as far as it can be read."""
    for number, tokens in _lines(text):
        words: list[str] = []
        for word, joined in _joined(tokens):
            if joined is None:
                words.append(word)
                continue
            statement = _statement(words, number, joined)
            if statement is not None:
                yield statement
            words = []
        statement = _statement(words, number, ";")
        if statement is not None:
            yield statement


def _statement(words: list[str], line: int, joined: str) -> ShellCommand | None:
    conditional = False
    while words and (words[0] in _OPENERS or words[0] in _CONDITIONS or _ASSIGNMENT.fullmatch(words[0])):
        conditional = conditional or words[0] in _CONDITIONS
        words = words[1:]
    if words[:1] and words[0] in _CLOSERS:
        return None
    return ShellCommand(tuple(words), line, joined, conditional) if words else None


def _lines(text: str) -> Iterator[tuple[int, list[str]]]:
    """Logical lines as tokens: continued ones joined, quotes closed, here-documents left out."""
    lines = enumerate(text.split("\n"), 1)
    for number, line in lines:
        while True:
            try:
                if re.search(r"(^|[^\\])(\\\\)*\\$", line):
                    raise ValueError("a continued line")
                tokens = _tokens(line)
                break
            except ValueError:  # or a quote that is still open
                _, more = next(lines, (0, None))
                if more is None:
                    return
                line = (line[:-1] + " " if line.endswith("\\") else line + "\n") + more
        if tokens:
            yield number, tokens
        ends = [after.lstrip("-") for token, after in itertools.pairwise(tokens) if token == "<<"]
        for end in ends:
            for _, skipped in lines:
                if skipped.strip() == end:
                    break


def _tokens(line: str) -> list[str]:
    lexer = shlex.shlex(_without_comment(line), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = ""  # shlex would take the one in ${#list} for a comment
    return list(lexer)


def _without_comment(line: str) -> str:
    quote = before = ""
    kept = []
    characters = iter(line)
    for character in characters:
        if character == "#" and not quote and (not before or before in " \t\n;|&()"):
            for skipped in characters:
                if skipped == "\n":
                    break
            character = "\n"
        elif character == quote:
            quote = ""
        elif character in "'\"" and not quote and before != "\\":
            quote = character
        kept.append(character)
        before = "" if before == "\\" and character == "\\" else character
    return "".join(kept)


def _joined(tokens: list[str]) -> Iterator[tuple[str, str | None]]:
    """Words (with None), and what joins them to the next ones. Redirections and command substitutions are
    left out."""
    left = iter(zip(tokens, [*tokens[1:], ""], strict=True))
    before = ""
    for token, after in left:
        if _is_punctuation(token):
            if before.endswith("$") and token.startswith("("):
                depth = token.count("(") - token.count(")")
                while depth > 0 and (inner := next(left, None)) is not None:
                    depth += inner[0].count("(") - inner[0].count(")") if _is_punctuation(inner[0]) else 0
            elif "<" in token or ">" in token:
                next(left, None)
            elif operator := token.replace("(", "").replace(")", ""):
                yield "", {"|": "|", "|&": "|", "||": "||", "&&": "&&", "&": "&"}.get(operator, ";")
        elif not (token.isdigit() and after[:1] in ("<", ">")):
            yield token, None
        before = token


def _is_punctuation(token: str) -> bool:
    return bool(token) and set(token) <= set("();<>|&")
