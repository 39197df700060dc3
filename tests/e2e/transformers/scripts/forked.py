"""Runs a script in a process that was forked with transformers imported: what the interpreter does at its
start is done first.

forked.py SCRIPT [ARGUMENT ...]
"""

import os
import runpy
import sys

from lastcall.auto import bootstrap

if os.environ.get("LASTCALL_ENABLED", "0") == "1":
    bootstrap.start()
del sys.argv[0]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
