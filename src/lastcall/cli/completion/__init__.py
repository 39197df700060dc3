"""Completion in shells: `grammar` reads the parser into values; `bash`, `zsh` and `fish` each write a script
of them; `command` prints it. The scripts are static: no Python starts at a press of Tab."""
