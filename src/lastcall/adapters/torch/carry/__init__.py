"""What a training loop carries from pass to pass and that was not handed over: locals, attributes, globals.
Found in the frames of the script and in its source, saved with each checkpoint, and put back where the
resumed loop begins."""
