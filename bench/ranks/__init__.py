"""Many ranks. `reports` is what a user runs; the other modules are what its processes run. Imports nothing:
the ranks of `notices` have no torch in them."""
