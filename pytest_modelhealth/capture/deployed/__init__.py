"""Models that another runtime runs, as named tensors.

A kind of model reads its graph into a `Program`, which says which operation of which layer makes
which value, and is a `Runtime`, which runs a batch and gives the values by name. `DeployedModel`
writes them down, layer by layer, as a run of modules would have shown them.
"""
