"""The file formats that the writer supports."""
