"""What the documents quote of lastcall's output stands in the source, word for word.

Every sentence in inline code, or in a block of output, is taken apart into strings of the source: formats,
whose gaps hold a number, a name, or another such string. A sentence with a word that no string has fails, and
so does one whose string was changed in the source.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# their blocks are drawings, and tables of `python -m bench`
NOT_OUTPUT = {"architecture.md", "internals.md", "benchmarks.md"}
FIELDS = "ended (saved, "  # `lastcall watch` writes names and values one after the other: no sentence

# ---- sentences of the documents ----------------------------------------------------------------------------

_SENTENCE = re.compile(r"(?:[\w'./-]+[,:;]? ){3,}[a-z]")
_FILE = re.compile(r"\S*[./*]\S*(?: \.\.\.)?")  # a block that begins so lists files, and says what is in them
_SHELL = re.compile(
    r"(\$|#|//|export |lastcall |python3? |make |kubectl |docker |torchrun |srun |sbatch |exec |- "
    r"|[{}\[\]@|]|\w+=|RUN |FROM )"
)


def quoted(text: str) -> Iterator[str]:
    """Sentences in inline code and in blocks without a language, each column of a line for itself."""
    fence = None
    text = re.sub(r"<!-- measured -->.*?<!-- /measured -->", "", text, flags=re.DOTALL)
    text = re.sub(r"\n {12,}(?!->)(?=\S)", " ", text)  # the rest of a sentence that was wrapped
    for line in text.splitlines():
        if opens := re.match(r"```(\w*)", line):
            fence = opens[1] or "text" if fence is None else None
        elif fence == "text" or (fence is None and line.startswith("    ")):
            columns = re.split(r" {2,}", line.strip().removeprefix("lastcall: ").removeprefix("-> "))
            listing = len(columns) == 2 and _FILE.fullmatch(columns[0])
            if not _SHELL.match(columns[0]) and not listing and "  # " not in line:
                yield from filter(_SENTENCE.search, columns)
        elif fence is None:
            code = (double or single for double, single in re.findall(r"``(.+?)``|`([^`]+)`", line))
            yield from (one for one in code if _SENTENCE.match(one) and one[0].isupper())


# ---- strings of the source ---------------------------------------------------------------------------------

_GAP = re.compile(r"%[-+ #0-9.*]*[sdrfgxe]|\{\w*\}")  # of logging, and of str.format()
_DATA = re.compile(
    r"\d\S*(?: \w+)?|`[^`]+`|\S*[./_]\S*|[\w-]+-\d+|[A-Z_\d]{3,}|\w+ \d[\d.]*(?: and "
    r"\d+)?|(?:python|bash) \S+|\.\.\."
)
_NAME = re.compile(r"(?:an? )?[\w./`'\[\]()-]*")  # what a gap may hold that is not written in the source
Template = tuple[str, ...]  # what stands between the gaps


def templates(source: str) -> Iterator[Template]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr | ast.Constant | ast.BinOp):
            yield tuple(_pieces(node))


def _pieces(node: ast.expr) -> list[str]:
    """Of a string: what stands between its gaps. Anything else is a gap."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _GAP.split(node.value.replace("%%", "%"))
    if isinstance(node, ast.JoinedStr):
        return _joined([_pieces(part) for part in node.values])
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _joined([_pieces(node.left), _pieces(node.right)])
    return ["", ""]


def _joined(parts: list[list[str]]) -> list[str]:
    pieces = [""]
    for first, *others in parts:
        pieces[-1] += first
        pieces += others
    return pieces


def words(text: str) -> list[str]:
    return re.findall(r"[A-Za-z]{2,}", text)


class Source:
    def __init__(self, texts: list[str]) -> None:
        self._by_word: dict[str, set[Template]] = defaultdict(set)
        for first, *others in {one for text in texts for one in templates(text)}:
            pieces = (first.lstrip(" ;,:.("), *others)
            inner = re.sub(r"\w*\0\w*", " ", "\0".join(pieces))  # a word beside a gap may be a part of one
            own = words(inner)
            for word in {own[0], max(own, key=len)} if own else words(" ".join(pieces)):
                self._by_word[word].add(pieces)
        self.explains = functools.cache(self._explains)

    def _explains(self, text: str) -> bool:
        text = text.strip()
        return (
            not words(text)
            or _DATA.fullmatch(text) is not None
            or self._as_template(text)
            or self._in_parts(text)
        )

    def _candidates(self, text: str) -> Iterator[Template]:
        for word in set(words(text)):
            yield from self._by_word.get(word, ())

    def _as_template(self, text: str) -> bool:
        whole, cut = text.removesuffix("...").rstrip(), text.endswith("...")
        return any(self._fills(template, whole, cut) for template in self._candidates(text))

    def _fills(self, template: Template, text: str, cut: bool, found: bool = False) -> bool:
        """Whether these pieces make this text, with gaps that can be explained. `cut`: the text may end
        before they do. `found`: a word of it stood in a piece before these."""
        piece, following = template[0], template[1:]
        if cut and piece.startswith(text):
            return found or bool(words(text))
        if not text.startswith(piece):
            return False
        rest, found = text[len(piece) :], found or bool(words(piece))
        if not following:
            return rest in ("", ".")
        ends = (
            end
            for end in range(len(rest) + 1)
            if rest.startswith(following[0], end) or (cut and following[0].startswith(rest[end:]))
        )
        return any(
            self._fills(following, rest[end:], cut, found)
            and self._explains_gap(rest[:end] + "..." * (cut and end == len(rest)))
            for end in ends
        )

    def _explains_gap(self, gap: str) -> bool:
        return _NAME.fullmatch(gap) is not None or self.explains(gap)

    def _in_parts(self, text: str) -> bool:
        """Strings put together: two sentences, a sentence and its reason, a list."""
        return any(
            self.explains(text[: found.start()]) and self.explains(text[found.end() :])
            for found in re.finditer(r"(?:\. |; |: |, | \(|\)| and | or )", text)
        )


@pytest.fixture(scope="module")
def source() -> Source:
    return Source([path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py")])


def test_e11_every_quoted_sentence_is_one_of_ours(source: Source) -> None:
    """E11: log lines that the documents quote exist."""
    missing = [
        f"{page.name}: {sentence}"
        for page in PAGES
        if page.name not in NOT_OUTPUT
        for sentence in quoted(page.read_text(encoding="utf-8"))
        if not sentence.startswith(FIELDS) and not source.explains(sentence)
    ]
    assert missing == []


_ALTERED = re.compile(r"(?<= )[a-z]{2,} [a-z]{2,}(?= |$|[.,;])")


def test_a_quoted_sentence_with_two_other_words_is_not_ours(source: Source) -> None:
    for page in PAGES:
        first = next(
            (found for sentence in quoted(page.read_text()) if (found := _ALTERED.search(sentence))), None
        )
        if page.name not in NOT_OUTPUT and first is not None:
            assert not source.explains(_ALTERED.sub("zebra crossing", first.string, count=1)), (
                page.name,
                first.string,
            )


# ---- the matching itself -----------------------------------------------------------------------------------

CODE = """
log.info("Saving step %d: %s, %s", step, kind, because)
because = f"needs {seconds:.1f} s" + ", and the deadline is far"
log.warning("Kept " "%d of %d checkpoints", a, b)
what = "the scheduler {name} is in use".format(name=name)
kind = "everything at once" if full else "weights only"
"""


@pytest.mark.parametrize(
    ("sentence", "ours"),
    [
        ("Saving step 7: weights only, needs 6.2 s, and the deadline is far", True),
        ("Saving step 7: weights only, needs 6.2 s", True),
        ("Saving step 7: weights only, ...", True),
        ("Saving step 7: some weights, needs 6.2 s", False),
        ("Storing step 7: weights only, needs 6.2 s", False),
        ("Saving step 7: weights only, needs 6.2 s, and the deadline is near", False),
        ("Kept 3 of 5 checkpoints", True),
        ("Kept 3 of 5 rather old checkpoints", False),
        ("Kept 3 of ...", True),
        ("Keeps 3 of ...", False),
        ("the scheduler `lr` is in use", True),
        ("the scheduler `lr` is in full use", False),
    ],
)
def test_a_sentence_is_ours_if_strings_of_the_source_make_it(sentence: str, ours: bool) -> None:
    assert Source([CODE]).explains(sentence) is ours


def test_sentences_are_found_in_code_and_output_and_nowhere_else() -> None:
    page = """
# A plain sentence in a title is not quoted
A `name`, a `shell command with words`, and `This is what the log says` in the text.

    $ lastcall ls runs/exp1 and more words
    lastcall: A run is at work here
    RISK     script   the shell runs it without exec
    state.json        everything that is not a tensor
    python train.py   # with a remark of five words

```python
raise ValueError("this is not our own output")
```
```
Removed all of the checkpoints
```
"""
    assert list(quoted(page)) == [
        "This is what the log says",
        "A run is at work here",
        "the shell runs it without exec",
        "Removed all of the checkpoints",
    ]
