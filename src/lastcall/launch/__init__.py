"""`lastcall run`: the process around the training. No framework is imported here."""
