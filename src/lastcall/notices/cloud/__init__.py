"""Announcements of the clouds to machines that they are about to preempt."""
