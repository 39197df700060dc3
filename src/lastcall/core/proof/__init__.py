"""What `lastcall drill --prove` compares: digests of every named piece of the state."""
