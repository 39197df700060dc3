"""Entering a save of the script in place: jumping into it."""
