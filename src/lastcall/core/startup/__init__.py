"""From protect() to the first step: the directory is taken over, a guarded state is recovered, the newest
checkpoint restored."""
