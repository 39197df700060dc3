"""`lastcall drill`: preempts a real run as a platform would, starts it again, and reports what was lost."""
