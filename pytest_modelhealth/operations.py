"""What is known of operations and layers by their names alone: one table, asked by trait.

A row is an operation: its name, its other spellings behind ``/`` (an operator, in place, batched,
of autograd), and its traits. Operations of the same traits share a row.
"""

from __future__ import annotations

from functools import cache

TRAITS = {
    # how values are passed on
    "view": "leaves values what they are, all of them or a part",
    "whole": "a view of all values, each once, in another layout or format",
    "regroup": "cuts the row of all values into other axes, in their order",
    "slice": "a view of a part, which a place or a size tells",
    "copy": "keeps the layout, too",
    "detach": "is written to let no gradient through",
    "integer": "rounds to whole numbers by a change of the type",
    "join": "puts several values side by side",
    "pad": "puts constants around values",
    "choice": "takes some of several values, by a mask, an index, a place or their size",
    "index": "takes values by indices or a mask",
    "order": "takes values by their size, or finds where they are",
    "fill": "writes some of several values, by indices or a mask",
    "table": "looks rows up",
    "move": "gives values another place",
    "count": "counts, or adds up in order",
    "route": "values of the run say by it which members of a list run, or count",
    # arithmetic
    "sum": "adds or subtracts two values",
    "difference": "subtracts one value from another",
    "product": "multiplies two values, number by number",
    "quotient": "divides",
    "matrix": "a product of which several values are summed; of those that add, it comes first",
    "total": "sums up one value",
    "average": "averages one value",
    "power": "grows faster than what it is given",
    "edge": "has no value, or no derivative, at the edge of its domain: roots, logarithms",
    "length": "the length of vectors",
    "guard": "keeps the length of a vector from zero, or makes it of its square",
    "coarse": "makes few kinds of many ids",
    "comparison": "gives truth values",
    # what comes out
    "flat": "has a gradient of zero everywhere, or beyond a bound",
    "clamp": "bounds values and leaves those between as they are",
    "hinge": "is zero on one side, which all samples may lie on",
    "never_negative": "gives no number below zero",
    "never_positive": "gives no number above zero",
    "keeps_sign": "gives numbers of the one sign that it is given",
    "turns_sign": "gives numbers of the other sign",
    "margin": "is done to cosines by losses with a margin or a scale",
    "draw": "draws numbers at random",
    "sample": "draws by the values that it is given",
    "dropout": "a dropout",
    "constant": "makes a constant of no random numbers",
    "zeros": "makes a constant of zeros, or is the number 0",
    # activations
    "softmax": "normalises over a dimension",
    "distribution": "gives what sums to one over it",
    "dying": "an activation with a side on which it is flat; a PReLU where it learnt so",
    "sloped": "one with a slope of a half at zero, or more: a gate of zero opens through it",
    # losses
    "loss": "a loss function of torch",
    "logits": "a loss that takes logits",
    "log_probabilities": "a loss that takes logarithms of probabilities",
    "classes": "a loss whose targets are class indices, the classes in dimension 1",
    "elementwise": "a loss of each number and its target",
    # modules of torch, by the names of their classes
    "normalization": "gives mean 0 and variance 1, or root mean square 1, by its scale and shift",
    "channels": "its units lie in dimension 1",
    "features": "its units lie in the last dimension",
    "container": "a list of modules, which may choose among its members",
}

_TABLE = """
alias, clone, contiguous, to/to_copy, float, double, half, bfloat16 : view whole copy
cpu, cuda, type, type_as : view whole copy
detach, data : view whole copy detach
flatten, reshape/reshape_alias, unflatten, unsafe_view, view, view_as : view whole regroup
movedim, mt, permute, squeeze, swapaxes, t, transpose, unsqueeze : view whole
chunk, getitem, narrow, select, slice, split, split_with_sizes, unbind : view slice choice
unsafe_chunk, unsafe_split, as_strided, diagonal : view slice choice
expand, expand_as : view
gather, index, index_select : choice index keeps_sign move
take_along_dim, masked_select : choice index keeps_sign
roll, flip : move
topk, sort, argsort, nonzero, kthvalue : choice order route
argmax, one_hot : choice route
max, min : choice keeps_sign margin
multinomial : route
bincount : route count
cumsum : total count
where, masked_fill, scatter, index_put : choice fill margin
masked_scatter, scatter_add : choice fill
embedding : table
cat, stack : join keeps_sign margin
pad/constant_pad_nd : pad
int, long, short : integer

add/iadd/radd : sum guard margin
sub/isub/subtract, rsub : sum difference margin
addcmul : sum matrix
mul/imul/multiply/rmul : product margin
div/divide/truediv/true_divide/itruediv : quotient coarse margin
reciprocal, rtruediv : quotient
floor_divide/floordiv, remainder/mod, bucketize, and, rshift : coarse
mm/matmul/bmm, addmm, baddbmm, addbmm, addmv, mv, dot, inner, outer, einsum, tensordot : matrix
linear, lerp, convolution : matrix
sum, nansum : total keeps_sign margin
mean : average keeps_sign
cosh, cumprod, exp2, expm1, float_power, prod, square : power
exp : power never_negative margin
pow : power margin
sqrt : edge guard keeps_sign margin
acos : edge margin
asin, atan2, atanh, erfinv, hypot, logit, log, log10, log1p, log2, logsumexp, rsqrt : edge
cdist, dist, std, std_mean : edge never_negative
norm, linalg_vector_norm : edge length never_negative
cos, sin : margin
neg : turns_sign margin
abs : never_negative
maximum : guard hinge
eq : comparison route
ne, lt, gt, le, ge, isin, bool, logical_not, bitwise_not, invert : comparison

clamp/clip, clamp_min, clamp_max : flat clamp hinge guard margin
hardtanh : flat clamp
ceil, fix, floor, heaviside, round, sgn, sign, trunc : flat
bernoulli : flat draw dropout sample
poisson : sample
rand, rand_like, new_rand, uniform : draw
randn, randn_like, randint, randint_like, exponential : draw
normal : draw sample
native_dropout, dropout, alpha_dropout, feature_dropout : dropout
0, zeros, zeros_like, new_zeros : constant zeros
ones, ones_like, new_ones, full, full_like, new_full : constant
arange, as_tensor, eye, linspace, scalar_tensor, tensor : constant

relu : dying flat hinge never_negative
threshold : dying flat hinge
relu6 : dying hinge never_negative
softplus : dying never_negative
gelu, hardswish, mish, silu : dying sloped
celu, elu, glu, hardshrink, prelu, selu, softshrink : dying
sigmoid, hardsigmoid : never_negative
softmax : softmax distribution never_negative
softmin : softmax distribution never_negative
log_softmax : softmax never_positive
logsigmoid/log_sigmoid : never_positive

cross_entropy : loss classes logits never_negative
binary_cross_entropy_with_logits : loss logits never_negative
binary_cross_entropy, soft_margin_loss : loss never_negative
nll_loss, nll_loss2_d, nll_loss_nd : loss classes log_probabilities turns_sign
ctc_loss, kl_div : loss log_probabilities
mse_loss, l1_loss, smooth_l1_loss, huber_loss : loss elementwise never_negative

BatchNorm1d, BatchNorm2d, BatchNorm3d, SyncBatchNorm : normalization
InstanceNorm1d, InstanceNorm2d, InstanceNorm3d : normalization
LayerNorm, RMSNorm : normalization features
GroupNorm : normalization channels
_ConvNd, _BatchNorm, _InstanceNorm, LocalResponseNorm : channels
_AdaptiveAvgPoolNd, _AdaptiveMaxPoolNd, _AvgPoolNd, _LPPoolNd, _MaxPoolNd, _MaxUnpoolNd : channels
PixelShuffle, PixelUnshuffle, Softmax2d, Upsample : channels
Dropout1d, Dropout2d, Dropout3d : channels dropout
Dropout, AlphaDropout, FeatureAlphaDropout : dropout
Linear, Bilinear, Embedding, EmbeddingBag : features
RNNBase, RNNCellBase, MultiheadAttention : features
ModuleDict, ModuleList, Sequential : container
"""

_NAMES: dict[str, str] = {}  # of each spelling, what it spells
_HAVING: dict[str, set[str]] = {trait: set() for trait in TRAITS}
for _row in filter(None, _TABLE.splitlines()):
    _operations, _traits = _row.split(" : ")
    for _spellings in _operations.split(", "):
        _name, *_others = _spellings.split("/")
        _NAMES |= dict.fromkeys((_name, *_others), _name)
        for _trait in _traits.split():
            _HAVING[_trait] |= {_name, *_others}


@cache
def having(*traits: str) -> frozenset[str]:
    """Return the operations that have one of these traits, in all their spellings."""
    return frozenset().union(*(_HAVING[trait] for trait in traits))


def name_of(spelling: str) -> str:
    """Return what an operation is called, however it is spelled: ``"add"`` for ``"iadd"``."""
    return _NAMES.get(spelling, spelling)
