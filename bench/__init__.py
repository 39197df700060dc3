"""Every speed claim of lastcall, side by side with the peers and the raw limit in one interleaved run: `make
bench`.

    python -m bench                     all of it, at the sizes the README quotes
    python -m bench save --size 1       one table, another size
    python -m bench --without dcp       leave methods out

"Durable" means the same for every method: the files and the directories that name them are fsynced before the
clock stops.
"""
