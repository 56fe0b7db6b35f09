"""Looking into models and gradients."""

from recur.inspect.draw import draw
from recur.inspect.gradcheck import Slope, gradcheck
from recur.inspect.picture import Picture

__all__ = ["Picture", "Slope", "draw", "gradcheck"]
