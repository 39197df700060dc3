"""Machines that share no directory: parts of checkpoints sent to the rank that commits, checkpoints sent to
the others."""
