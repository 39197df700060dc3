"""PyTorch's distributed checkpoint (DCP), written and read in lastcall's format: its planners decide, our
engine moves the bytes."""
