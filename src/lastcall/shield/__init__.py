"""Signals in a training process: listening to them, and keeping its children alive until the run has saved.
Independent of any framework."""
