"""Models on either side of a check's line, each small enough to read at a glance.

A file holds `CHECK`, the name of the check, and two tables by a name in words. A row of `FAULTS`
holds a function that makes the model, with a batch, target and loss where it needs others than 64
samples of 16 features; whether the check fails, warns or is unsure; the layer that it names, or
``None`` where any is right; words that stand in what it says, or in the line of code that it names;
and as a set the layers that go with it. `HEALTHY` holds such functions of models that only look
like it. `ALONE` names the tables in whose rows no other check objects; where one does all the same,
an ellipsis stands among the words.

Beside the shelves, these are no cases that a tool is scored on: they show where a check's line is.
"""
