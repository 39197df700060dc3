"""The objects below a loader (samplers, datasets, functions) and what they hold."""
