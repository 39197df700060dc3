"""python pipelines_child.py MODULE NAME ...: plays rows of a table of shapes. A process of the nursery's."""

from __future__ import annotations

import sys

from helpers.data import pipelines

if __name__ == "__main__":  # a worker that is spawned imports this file again
    pipelines.main(sys.argv[1], sys.argv[2:])
