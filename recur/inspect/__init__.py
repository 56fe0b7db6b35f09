"""Looking into models and gradients."""

from recur.inspect.draw import draw
from recur.inspect.explain import Explained, Explanation, explain
from recur.inspect.gradcheck import Slope, gradcheck
from recur.inspect.gradient_lag import GradientLag, gradient_lag
from recur.inspect.picture import Picture

__all__ = [
    "Explained",
    "Explanation",
    "GradientLag",
    "Picture",
    "Slope",
    "draw",
    "explain",
    "gradcheck",
    "gradient_lag",
]
