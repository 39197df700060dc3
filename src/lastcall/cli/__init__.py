"""The commands of `lastcall`: one module each, imported only when its command is called. None of them imports
a framework."""
