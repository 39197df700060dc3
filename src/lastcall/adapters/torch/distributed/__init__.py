"""torch.distributed: its store, who holds which piece of a tensor, the buckets of DDP."""
