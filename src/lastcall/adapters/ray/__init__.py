"""Ray Train: one callback of ours beside Ray's own. The only code that imports ray.

driver      adds the callback; gives the run a name that a resubmitted job has too; RunConfig's argument; the
            trials of Ray Tune, which are drivers themselves
controller  hosts the store in which the ranks meet, and informs them of what is committed
worker      a train worker: `notices` receives them, `responder` is the strategy, `steps` and `decisions` find
            the step that all ranks save, `reporting` and `committing` take the report to its commit,
            `api_use` knows what the script does itself
saves       what saves: the script, its Trainer, or the state of model and optimizer; what was persisted and
            never committed
internals   every private name of Ray that is used
"""
