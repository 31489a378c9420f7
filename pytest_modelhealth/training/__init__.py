"""What a training does: the contract of one step, and the monitor of many.

`contract` has what is wrong with a training step, `stepping` runs the step for them, `monitoring`
watches the steps of the user's own loop.
"""
