"""Jobs in a cluster through the user's own kubectl: status, pause, resume."""
