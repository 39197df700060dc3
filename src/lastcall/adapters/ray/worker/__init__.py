"""In a train worker: steps, a notice, the agreement of the ranks, report()."""
