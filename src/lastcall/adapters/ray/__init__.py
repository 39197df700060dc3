"""Ray Train: one callback of ours beside Ray's own. The only code that imports ray.

driver      the callback is added, the run gets a name that a resubmitted job has, too; RunConfig's own
            argument; the trials of Ray
            Tune, which are drivers themselves
controller  the store in which the ranks meet, the news of what is committed
worker      a train worker: `responder` is its strategy for a notice, `steps` and `decisions` find the step
            that all ranks save,
            `reporting` and `committing` take the report to its commit, `flow` knows what the script does by
            itself
saves       what saves: the script, its Trainer, or the state of model and optimizer; what was persisted and
            never committed
internals   every private name of Ray that is used
"""
