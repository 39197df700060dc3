"""Ray Train: lastcall beside Ray's own get_preemption_info(), on real clusters of several nodes on this
machine."""
