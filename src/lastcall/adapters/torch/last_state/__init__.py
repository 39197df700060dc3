"""The small state of each rank at each boundary, for those who must save for a rank that was killed."""
