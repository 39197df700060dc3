"""Bytes from memory to disk and back: the writer, its segments, digests, snapshots, huge pages. Knows no
checkpoint."""
