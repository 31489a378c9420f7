"""Which layer of one model is which of another, whether runs or snapshots show the two.

`matching` finds the pairs, `result` is what comes of it and what is read of a layer, `causes` says
what became of calls and tied weights.
"""
