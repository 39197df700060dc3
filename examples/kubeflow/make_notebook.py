"""Makes jit_checkpointing.ipynb of jit_checkpointing.py, whose cells begin with `# %%`: python
examples/kubeflow/make_notebook.py"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve().parent / "jit_checkpointing.py"
NOTEBOOK = SCRIPT.with_suffix(".ipynb")


def notebook(script: str) -> str:
    _, *parts = script.split("# %%")
    cells = [_cell(number, part) for number, part in enumerate(parts)]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def _cell(number: int, part: str) -> dict[str, Any]:
    kind, _, text = part.partition("\n")
    lines = text.strip("\n").splitlines()
    common = {"id": f"cell-{number}", "metadata": {}}
    if kind.strip() == "[markdown]":
        return {
            "cell_type": "markdown",
            **common,
            "source": _lines([line.removeprefix("#").removeprefix(" ") for line in lines]),
        }
    return {"cell_type": "code", **common, "execution_count": None, "outputs": [], "source": _lines(lines)}


def _lines(lines: list[str]) -> list[str]:
    return [f"{line}\n" for line in lines[:-1]] + lines[-1:]


if __name__ == "__main__":
    NOTEBOOK.write_text(notebook(SCRIPT.read_text()))
