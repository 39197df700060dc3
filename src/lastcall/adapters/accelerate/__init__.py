"""Hugging Face Accelerate: loops of one's own around an Accelerator, with `lastcall.protect(directory,
accelerator=accelerator)`."""
