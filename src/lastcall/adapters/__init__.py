"""One package a framework: the only places that import it. Adapters do not know each other."""
