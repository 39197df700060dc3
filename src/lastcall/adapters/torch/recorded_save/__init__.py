"""Running a framework's own save and keeping what it would write, as file layouts."""
