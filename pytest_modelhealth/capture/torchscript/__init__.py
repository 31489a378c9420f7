"""TorchScript: where its code came from, and the operations of a graph without layers.

Freezing puts the code of all layers into one graph and turns parameters into constants. What is
left of a layer is an operation, and the name of the constant that it takes.
"""
