"""python -m lastcall"""

from __future__ import annotations

import sys

from lastcall.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
