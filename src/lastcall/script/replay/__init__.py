"""Replaying a save of the script elsewhere: its statements, with the values they had."""
