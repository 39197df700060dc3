"""`lastcall drill`: preempts a real run as a platform would, restarts it, and reports what was lost."""
