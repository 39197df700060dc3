"""Hugging Face Transformers: `Trainer.train()` is protected, its own checkpoint format is what is written.

patch      what is put around Trainer.train(), for all trainers (zero code) or for those that have our
           callback
run        one train() call: session, signals, boundaries, what follows a save
subject    the trainer as the core sees it
ledger     the small state of a trainer: counters, losses, callbacks, and what of a step is still to be done
recording  HF's own save, made into files that the core's writer writes
choosing   which checkpoint a train() call resumes from
"""
