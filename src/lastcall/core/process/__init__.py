"""This process and those around it: identity, registry of the launcher, orphans, exit codes, log lines."""
