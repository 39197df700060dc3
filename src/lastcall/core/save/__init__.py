"""From a capture to a committed checkpoint in a directory: the plan, the files, the space for them."""
