"""The ways to save in a train worker: the script's own save, a Trainer's, or the state itself."""
