"""Losses under Flux's names: `loss(yhat, y, *, agg=mean, mask=None, ...)`.

yhat   prediction, features on axis 0: (F,), (F, B) or (F, B, T); or a list of steps, (F,) or (F, B)
y      target of yhat's shape, or a plain number; or a list of steps.  Never broadcast: (1, B)
       against (B,) would give a (B, B) loss in silence.  The classification losses also take
       classes as integers, without the class axis.  Gradient flows into a recorded y as well
agg    what makes one number of the entries: mean (default), sum, identity, or any function.  A list
       is one array with time on the last axis, so mean is over all steps
mask   bool, False at padded steps: (B,) or (B, T), or a list of (B,); the shape of yhat without its
       feature axis.  mean divides by the entries that count (their mean is 0 if there are none),
       identity and other functions see 0 at the others.  What yhat and y hold there is never read,
       NaN included, and its gradient is exactly zero

Each loss is computed in yhat's dtype, and recorded as one node.  All raise `ShapeError` if shapes
differ and `TypeError` if the mask is not bool.
"""

from recur.losses.ctc import ctc_loss
from recur.losses.entries import (
    binarycrossentropy,
    crossentropy,
    hinge_loss,
    huber,
    huber_loss,
    kldivergence,
    label_smoothing,
    logitbinarycrossentropy,
    logitcrossentropy,
    mae,
    mse,
    msle,
    poisson_loss,
    squared_hinge_loss,
)

__all__ = [
    "binarycrossentropy",
    "crossentropy",
    "ctc_loss",
    "hinge_loss",
    "huber",
    "huber_loss",
    "kldivergence",
    "label_smoothing",
    "logitbinarycrossentropy",
    "logitcrossentropy",
    "mae",
    "mse",
    "msle",
    "poisson_loss",
    "squared_hinge_loss",
]
