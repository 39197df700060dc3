"""Ray Train: one callback of ours beside Ray's own. The only code that imports ray.

patch, naming, versions,    the driver: the callback is added, the run gets a name that a resubmitted job has, too; RunConfig's own
config, tuning              argument; the trials of Ray Tune, which are drivers themselves
callback, controller        the controller: the store in which the ranks meet, the news of what is committed
worker, echo, boundary,     the train worker: notices, the step that all ranks save, the report that commits it
serving, deciding, reporting
flow, trainers              what the script does by itself, and the Trainers that save for it
leftover                    what was persisted and never committed
internals                   every private name of Ray that is used
"""
