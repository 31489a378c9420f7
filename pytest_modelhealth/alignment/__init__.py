"""Which layer of one model is which of another, whether runs or snapshots show the two.

`alignable` is what is read of a layer, `matching` finds the pairs, `result` is what comes of it,
`causes` says what became of calls and tied weights.
"""
