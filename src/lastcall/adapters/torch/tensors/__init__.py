"""Tensors as bytes: views, dtypes, strides, arrays, CUDA copies, pinned buffers, the table of tensors in a
checkpoint."""
