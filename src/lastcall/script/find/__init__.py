"""Finding the save in the script's source."""
