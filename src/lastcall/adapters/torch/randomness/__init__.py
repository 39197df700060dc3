"""The random generators of the process, captured cheaply and put back."""
