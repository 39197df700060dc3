"""Output of the commands: sentences and tables for people, JSON for programs.

`terminal` knows the width and whether colours are wanted, `layout` fits text into that width, `documents`
writes JSON, `values` turns numbers into words. Imports nothing of lastcall.
"""

from lastcall.cli.output.documents import SCHEMA, JsonFlag, add_json, document, line
from lastcall.cli.output.layout import pair, say, table, wrapped, write
from lastcall.cli.output.terminal import Colour, coloured, interactive, paint, state, width
from lastcall.cli.output.values import age, duration, moment, number, plural, printable, size

__all__ = [
    "SCHEMA",
    "Colour",
    "JsonFlag",
    "add_json",
    "age",
    "coloured",
    "document",
    "duration",
    "interactive",
    "line",
    "moment",
    "number",
    "paint",
    "pair",
    "plural",
    "printable",
    "say",
    "size",
    "state",
    "table",
    "width",
    "wrapped",
    "write",
]
