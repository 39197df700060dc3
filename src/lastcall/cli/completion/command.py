"""`lastcall completion`: prints a script that completes commands, options and their values in a shell."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from lastcall.cli import parser as parsers
from lastcall.cli.completion import bash, fish, zsh
from lastcall.cli.completion.grammar import read

SHELLS = {"bash": bash.script, "zsh": zsh.script, "fish": fish.script}
_INSTALL = """bash, in ~/.bashrc:
  eval "$(lastcall completion bash)"

zsh, in ~/.zshrc, below compinit:
  eval "$(lastcall completion zsh)"

fish:
  lastcall completion fish > ~/.config/fish/completions/lastcall.fish

The script knows the commands of the version that printed it: print it again after an upgrade. With eval, that
happens in each new shell.

examples:
  lastcall completion bash > /etc/bash_completion.d/lastcall
  lastcall completion zsh > "${fpath[1]}/_lastcall"
"""


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "completion",
        description="Prints a script that completes commands, options and their values when you press Tab.",
        epilog=_INSTALL,
    )
    parser.add_argument("shell", metavar="SHELL", choices=tuple(SHELLS), help="bash, zsh or fish")
    parser.set_defaults(call=run)


def run(args: argparse.Namespace) -> int:
    sys.stdout.write(SHELLS[args.shell](read(parsers.build(parsers.COMMANDS))))
    return 0
