"""The second copy of the checkpoints in an object store or another folder: upload, download, the remote
catalog."""
