"""Hugging Face's Trainer: real trainings in processes of their own, unprotected, with Transformers' own
callback, and with lastcall."""
