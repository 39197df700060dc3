"""What the clouds tell the machines that they are about to take away."""
