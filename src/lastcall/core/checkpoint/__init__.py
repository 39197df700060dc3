"""What a checkpoint on disk is: its record, its file names, the catalog of a directory, and who owns the
directory."""
