"""Shared memory that outlives a killed process: the guarded copy of the state, and the last small state of
each rank."""
