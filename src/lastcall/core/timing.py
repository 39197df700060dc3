"""Seconds that several parts of lastcall must agree on. What only one module waits for stands there."""

from __future__ import annotations

MARGIN = 0.5  # kept back before the deadline: a save that is planned ends by then
COMMIT = 0.3  # of these, for fsync, record and rename
# between two looks for something that is not announced: a file of the launcher, a word of another rank
LOOK = 0.25
TICK = 0.1  # between two looks of threads that wait for each other
RESTART = 3600.0  # in which a start follows an exit with the code that asks for one
AFTERWARDS = 10.0  # after its deadline a process that should be dead counts as dead
RANKS = 5.0  # for the slowest rank's agent to say where it is, at least
