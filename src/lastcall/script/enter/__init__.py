"""SaveEntry a save of the script where it stands: jumping into it."""
