"""Words that several cards share: one has to stand in what is said of the fault."""

from __future__ import annotations

ANY = "*"

MODEL = ("", "loss")
"""The model as a whole, where the loss or the batch is at fault."""

CUT = ("detach", "no_grad", "cut", "graph", "argmax", ".data", "not differentiable")
NONFINITE = ("nan", "inf", "overflow", "log", "divi", "sqrt")
RANGE = ("scale", "normali", "standardi", "range", "0 to 255", "0-255", "255", "raw", "units")
CUT_OR_ONE_HOT = (
    "detach",
    "no_grad",
    "cut",
    "graph",
    "argmax",
    ".data",
    "not differentiable",
    "one-hot",
)
NONFINITE_OR_ROOT = ("nan", "inf", "overflow", "log", "divi", "sqrt", "root")
UNSCALED = ("range", "scale", "normali", "standardi", "large", "unscaled", "magnitude")
REGISTERED = ("regist", "named_parameters", "modulelist", "moduledict", "nn.parameter", "list")
CUT_OR_ITEM = ("detach", "no_grad", "cut", "graph", ".data", "not differentiable", "argmax", "item")
ZERO = ("zero", "init")
LARGE = ("large", "scale", "init", "grow", "explod")
RAW = ("normal", "standard", "scale", "raw", "255", "twice")
CUT_OR_COMPARED = (
    "detach",
    "no_grad",
    "cut",
    "graph",
    "argmax",
    ".data",
    "not differentiable",
    "compar",
)
CLOSED = ("gate", "factor", "scale", "buffer", "closed")  # "zero" stands in every such message

UNREAD = ("not used", "unused", "nothing reads", "not read", "not depend", "in vain", "drop")
UNUSED = (
    *("not used", "unused", "never used", "ignored", "discard", "overwr", "no effect"),
    *("does not depend", "not read", "never read", "nothing reads", "nothing uses"),
)
NEVER = ("never called", "not called", "never ran", "never run", "not run", "not used", "unused")
DETACHED = ("detach", ".data", "no_grad", "is cut", "cuts")
RESIDUAL = ("residual", "skip", "shortcut", "added", "adding", "addition", " sum")
ONE_SAMPLE = ("first sample", "one sample", "sample 0", "samples", "expand", "slice", "dimension 0")
OVER_BATCH = ("over the batch", "across the batch", "batch dimension", "samples", "dimension 0")
