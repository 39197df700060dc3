"""The exact position inside a DataLoader, saved and brought back. `loaders` is the way in."""
