"""One module for each subject that `lastcall doctor` checks; each returns findings."""
