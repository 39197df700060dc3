"""One module a subject that `lastcall doctor` looks at; each returns findings."""
