"""Announcements of the clouds to machines that they are about to preempt."""

CLOUDS = ("auto", "aws", "gcp", "azure", "none")  # what --cloud takes
