"""Zero code: the bootstrap (standard library only) and the patches it applies after a framework's import."""
