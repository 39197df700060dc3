"""What ranks know of each other: the world, agreement through the store, heartbeats, receipts, who writes
what."""
