"""The save that a training script has of its own: found in its source, entered in its frame, or replayed. Knows no framework."""
