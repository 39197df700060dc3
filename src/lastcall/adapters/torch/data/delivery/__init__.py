"""Between a loader and the loop: what was delivered, how far ahead the script reads, what is replayed."""
