"""Live PyTorch state as documents and bytes, and back. `entries` is the way in."""
