"""What all ranks of a run do together: start, answer a notice, save one checkpoint. Built on `ranks`."""
