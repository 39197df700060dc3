"""The adapter for plain PyTorch."""
