"""Models that another runtime runs: what it computed is played back under the usual hooks.

A runtime gives every value of a run by its name, and a `Program` says which operation of which
layer made which value. Stand-ins for the layers then call each other, and their operations return
what the runtime computed, so that whatever watches modules and functions sees this model too.
"""
