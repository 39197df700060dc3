"""The loop that a script writes around its steps: what `run.steps`, `run.epochs` and `run.batches` return,
and what is checked."""
