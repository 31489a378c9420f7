"""TorchScript graphs whose layers were inlined: read, run with every value shown, and retold.

Freezing puts the code of all layers into one graph and turns parameters into constants. Each node
still knows which module it came from, so the graph can be read as a `Program`.
"""
