"""Looking into models and gradients."""

from recur.inspect.gradcheck import Slope, gradcheck

__all__ = ["Slope", "gradcheck"]
