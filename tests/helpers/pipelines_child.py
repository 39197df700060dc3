"""python pipelines_child.py MODULE NAME ...: plays rows of a table of shapes. A process of the nursery's."""

from __future__ import annotations

import sys

from helpers import pipelines

pipelines.main(sys.argv[1], sys.argv[2:])
