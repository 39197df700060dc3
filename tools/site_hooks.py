"""What mkdocs reads in another way than GitHub, for `make docs`."""

from __future__ import annotations

import re
from typing import Any

_ROW = re.compile(r"^\|.*\|$", re.MULTILINE)
_CODE = re.compile(r"`[^`\n]+`")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A pipe in the code of a table: GitHub wants it escaped, mkdocs would show the backslash."""

    def plain(row: re.Match[str]) -> str:
        return _CODE.sub(lambda code: code[0].replace(r"\|", "|"), row[0])

    return _ROW.sub(plain, markdown)
