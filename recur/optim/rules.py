"""The rules: what an optimiser makes of a gradient g before it is subtracted from the weights.

Every equation below gives the step d of `x -= d`; eta is the learning rate, t counts the updates
of a parameter from 1, every state starts at 0 unless it says otherwise.  Names, orders of arguments
and defaults are those of Optimisers.jl.  A hyperparameter may be a number or a schedule, which is
any function of the number of updates done so far.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from recur import _kernels

State = dict[str, Any]
Number = Any  # a float, or a schedule; in `apply` it is always a float
Betas = tuple[Number, Number]


class Rule:
    """The base of all rules, and of your own.

    A rule's attributes are its hyperparameters.  `init` and `apply` are all that it has to define.
    """

    #: Whether a step's element depends on the same element of x, g and the state alone.  The rule
    #: is then applied to blocks that fit the cache, which may run across parameters, so its state
    #: holds arrays of x's shape and nothing else, and `apply` writes them in place.
    elementwise: ClassVar[bool] = False

    def init(self, x: np.ndarray) -> State:
        """The state of one parameter: a dict of arrays and numbers.  x is read-only."""
        return {}

    def apply(self, state: State, x: np.ndarray, dx: np.ndarray, t: int) -> np.ndarray:
        """The step for one parameter, after bringing `state` up to date in place.

        x   the parameter's values, to be read only
        dx  the gradient, or what the rule before made of it: yours to overwrite
        t   1 at the first update of this parameter

        Returns an array of x's shape and dtype that the caller may overwrite: dx or a new one,
        never an array of the state.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no apply().")

    def hyperparameters(self) -> dict[str, Any]:
        """The numbers and schedules that the rule was made with, by name: a new dict."""
        return dict(vars(self))

    def with_(self, **new: Any) -> Rule:
        """A copy with some hyperparameters changed."""
        rule = copy.copy(self)
        for name, number in new.items():
            object.__setattr__(rule, name, _plain(number))
        rule.check()
        return rule

    def check(self) -> None:
        """Raises `ValueError`, `TypeError` for hyperparameters that make no sense."""
        for name, number in vars(self).items():
            if name not in _LEGAL:
                continue
            legal, wanted = _LEGAL[name]
            pair = name == "beta" and not callable(number)
            fits = not pair or (isinstance(number, tuple) and len(number) == 2)
            for one in number if pair and fits else (number,):
                if fits and (one is None or callable(one)):
                    continue
                if fits and not isinstance(one, (int, float)):
                    raise TypeError(
                        f"{type(self).__name__}: {name} is {one!r}, expected a number or a "
                        "schedule."
                    )
                if not (fits and legal(one)):
                    raise ValueError(f"{type(self).__name__}: {name} is {number}, {wanted}.")

    def at(self, step: int) -> Rule:
        """The rule with the values that its schedules have after `step` updates."""
        new = {name: _at(step, number) for name, number in vars(self).items() if _scheduled(number)}
        return self.with_(**new) if new else self


def _scheduled(number: Any) -> bool:
    return any(map(callable, number)) if isinstance(number, tuple) else callable(number)


def _at(step: int, number: Any) -> Any:
    if isinstance(number, tuple):
        return tuple(_at(step, one) for one in number)
    return number(step) if callable(number) else number


def _plain(number: Any) -> Any:
    """Python's own numbers: a NumPy float64 would make a float32 rule compute in float64."""
    if isinstance(number, (tuple, list)):
        return tuple(map(_plain, number))
    return number.item() if isinstance(number, (np.generic, np.ndarray)) else number


_LEGAL: dict[str, tuple[Callable[[float], bool], str]] = {
    "eta": (lambda v: v >= 0, "a learning rate cannot be negative"),
    "rho": (lambda v: 0 <= v <= 1, "expected a number from 0 to 1"),
    "beta": (lambda v: 0 <= v < 1, "expected two numbers from 0 to below 1"),
    "epsilon": (lambda v: v >= 0, "expected a number that is not negative"),
    "lambda_": (lambda v: v >= 0, "expected a number that is not negative"),
    "delta": (lambda v: v > 0, "expected a number above 0"),
    "omega": (lambda v: v > 0, "expected a number above 0"),
    "p": (lambda v: v > 0, "expected a number above 0"),
    "start": (lambda v: v is None or v >= 0, "expected a number of updates, or None"),
}


@dataclass(frozen=True)
class Elementwise(Rule):
    """A rule that is elementwise, as a frozen dataclass of hyperparameters."""

    elementwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name, number in vars(self).items():
            object.__setattr__(self, name, _plain(number))
        self.check()


def _decayed(average: np.ndarray, rate: float, new: np.ndarray) -> None:
    """average = rate average + (1 - rate) new, in place."""
    average *= rate
    average += (1 - rate) * new


def _decayed_square(average: np.ndarray, rate: float, new: np.ndarray) -> None:
    """average = rate average + (1 - rate) new^2, in place."""
    square = new * new
    square *= 1 - rate
    average *= rate
    average += square


@dataclass(frozen=True)
class Descent(Elementwise):
    """Gradient descent: d = eta g."""

    eta: Number = 0.1

    def apply(self, state: State, x: np.ndarray, dx: np.ndarray, t: int) -> np.ndarray:
        dx *= self.eta
        return dx


@dataclass(frozen=True)
class Momentum(Elementwise):
    """Momentum: v = rho v + eta g, d = v.

    Source: Polyak, Some methods of speeding up the convergence of iteration methods, 1964.
    """

    eta: Number = 0.01
    rho: Number = 0.9

    def init(self, x: np.ndarray) -> State:
        return {"velocity": np.zeros_like(x)}

    def apply(self, state: State, x: np.ndarray, dx: np.ndarray, t: int) -> np.ndarray:
        v = state["velocity"]
        v *= self.rho
        dx *= self.eta
        v += dx
        dx[...] = v
        return dx


@dataclass(frozen=True)
class Nesterov(Elementwise):
    """Nesterov's momentum, seen from the point looked ahead to:

    d = (1 + rho) eta g - rho^2 v, then v = rho v - eta g.

    Source: Sutskever et al., On the importance of initialization and momentum, 2013.
    """

    eta: Number = 0.001
    rho: Number = 0.9

    def init(self, x: np.ndarray) -> State:
        return {"velocity": np.zeros_like(x)}

    def apply(self, state: State, x: np.ndarray, dx: np.ndarray, t: int) -> np.ndarray:
        v = state["velocity"]
        dx *= self.eta
        step = (1 + self.rho) * dx
        step -= self.rho**2 * v
        v *= self.rho
        v -= dx
        return step


@dataclass(frozen=True)
class RMSProp(Elementwise):
    """RMSProp: v = rho v + (1 - rho) g^2, d = eta g / (sqrt(v) + epsilon).

    centred  divides by the deviation sqrt(v - m^2) instead, m = rho m + (1 - rho) g

    Source: Tieleman and Hinton, Lecture 6.5, 2012; centred: Graves, Generating sequences with
    recurrent neural networks, 2013.
    """

    eta: Number = 0.001
    rho: Number = 0.9
    epsilon: float = 1e-8
    centred: bool = field(default=False, kw_only=True)

    def init(self, x: np.ndarray) -> State:
        names = ("square", "mean") if self.centred else ("square",)
        return {name: np.zeros_like(x) for name in names}

    def apply(self, state: State, x: np.ndarray, dx: np.ndarray, t: int) -> np.ndarray:
        v = state["square"]
        _decayed_square(v, self.rho, dx)
        if self.centred:
            m = state["mean"]
            _decayed(m, self.rho, dx)
            # Rounding may leave a variance just below 0.
            root = np.sqrt(np.maximum(v - m * m, 0))
        else:
            root = np.sqrt(v)
        root += self.epsilon
        dx *= self.eta
        dx /= root
        return dx


@dataclass(frozen=True)
class AdaGrad(Elementwise):
    """AdaGrad: v = v + g^2, starting at epsilon; d = eta g / (sqrt(v) + epsilon).

    Source: Duchi, Hazan and Singer, Adaptive subgradient methods, 2011.
    """

    eta: Number = 0.1
    epsilon: float = 1e-8

    def init(self, x: np.ndarray) -> State:
        return {"square": np.full_like(x, self.epsilon)}

    def apply(self, state: State, x: np.ndarray, dx: np.ndarray, t: int) -> np.ndarray:
        v = state["square"]
        v += dx * dx
        root = np.sqrt(v)
        root += self.epsilon
        dx *= self.eta
        dx /= root
        return dx


@dataclass(frozen=True)
class AdaDelta(Elementwise):
    """AdaDelta: v = rho v + (1 - rho) g^2, d = g sqrt(u + epsilon) / sqrt(v + epsilon),

    then u = rho u + (1 - rho) d^2.

    Source: Zeiler, ADADELTA, 2012.
    """

    rho: Number = 0.9
    epsilon: float = 1e-8

    def init(self, x: np.ndarray) -> State:
        return {"square": np.zeros_like(x), "step_square": np.zeros_like(x)}

    def apply(self, state: State, x: np.ndarray, dx: np.ndarray, t: int) -> np.ndarray:
        v, u = state["square"], state["step_square"]
        _decayed_square(v, self.rho, dx)
        dx *= np.sqrt(u + self.epsilon)
        dx /= np.sqrt(v + self.epsilon)
        _decayed_square(u, self.rho, dx)
        return dx


class _Moments(Elementwise):
    """What Adam and its kin share: decayed means of the gradient and of its square."""

    eta: Number
    beta: Betas
    epsilon: float

    def init(self, x: np.ndarray) -> State:
        return {"mean": np.zeros_like(x), "square": np.zeros_like(x)}

    def moments(self, state: State, dx: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The decayed means of dx and of dx², moved on in `state` by this gradient."""
        m, v = state["mean"], state["square"]
        _decayed(m, self.beta[0], dx)
        _decayed_square(v, self.beta[1], dx)
        return m, v

    def corrected_root(self, v: np.ndarray, t: int) -> np.ndarray:
        """sqrt(v / (1 - beta2^t)) + epsilon."""
        root = v * (1 / (1 - self.beta[1] ** t))
        np.sqrt(root, out=root)
        root += self.epsilon
        return root

    def apply(self, state: State, x: np.ndarray, dx: np.ndarray, t: int) -> np.ndarray:
        """Adam's step."""
        m, v = self.moments(state, dx)
        np.multiply(m, self.eta / (1 - self.beta[0] ** t), out=dx)
        dx /= self.corrected_root(v, t)
        return dx


@dataclass(frozen=True)
class Adam(_Moments):
    """Adam: m = beta1 m + (1 - beta1) g, v = beta2 v + (1 - beta2) g^2,

    d = eta m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + epsilon).

    Source: Kingma and Ba, Adam, 2015.
    """

    eta: Number = 0.001
    beta: Betas = (0.9, 0.999)
    epsilon: float = 1e-8


@dataclass(frozen=True)
class AdamW(_Moments):
    """Adam with weight decay beside the gradient: d = a + eta lambda_ x, where a is Adam's step.

    couple  False decays without eta, d = a + lambda_ x, as Flux did before its version 0.15

    Source: Loshchilov and Hutter, Decoupled weight decay regularization, 2019.
    """

    eta: Number = 0.001
    beta: Betas = (0.9, 0.999)
    lambda_: Number = 0.0
    epsilon: float = 1e-8
    couple: bool = field(default=True, kw_only=True)

    def apply(self, state: State, x: np.ndarray, dx: np.ndarray, t: int) -> np.ndarray:
        step = super().apply(state, x, dx, t)
        step += (self.eta * self.lambda_ if self.couple else self.lambda_) * x
        return step


@dataclass(frozen=True)
class AMSGrad(Adam):
    """AMSGrad: m and v as in Adam, w = max(w, v), all starting at epsilon;

    d = eta m / (sqrt(w) + epsilon), without bias correction.

    Source: Reddi, Kale and Kumar, On the convergence of Adam and beyond, 2018.
    """

    def init(self, x: np.ndarray) -> State:
        return {name: np.full_like(x, self.epsilon) for name in ("mean", "square", "largest")}

    def apply(self, state: State, x: np.ndarray, dx: np.ndarray, t: int) -> np.ndarray:
        m, v = self.moments(state, dx)
        w = np.maximum(state["largest"], v, out=state["largest"])
        root = np.sqrt(w)
        root += self.epsilon
        np.multiply(m, self.eta, out=dx)
        dx /= root
        return dx


@dataclass(frozen=True)
class NAdam(Adam):
    """Adam with Nesterov's momentum: m and v as in Adam,

    d = eta (beta1 m / (1 - beta1^(t+1)) + (1 - beta1) g / (1 - beta1^t))
            / (sqrt(beta2 v / (1 - beta2^t)) + epsilon).

    Source: Dozat, Incorporating Nesterov momentum into Adam, 2016.
    """

    def apply(self, state: State, x: np.ndarray, dx: np.ndarray, t: int) -> np.ndarray:
        m, v = self.moments(state, dx)
        b1, b2 = self.beta
        root = self.corrected_root(b2 * v, t)
        dx *= self.eta * (1 - b1) / (1 - b1**t)
        dx += self.eta * b1 / (1 - b1 ** (t + 1)) * m
        dx /= root
        return dx


@dataclass(frozen=True)
class RAdam(Adam):
    """Rectified Adam: m and v as in Adam, R = 2 / (1 - beta2) - 1,

    r = R - 2 t beta2^t / (1 - beta2^t); while r <= 4, d = eta m / (1 - beta1^t), then Adam's step
    times sqrt((r - 4) (r - 2) R / ((R - 4) (R - 2) r)).

    Source: Liu et al., On the variance of the adaptive learning rate and beyond, 2020.
    """

    def apply(self, state: State, x: np.ndarray, dx: np.ndarray, t: int) -> np.ndarray:
        m, v = self.moments(state, dx)
        b1, b2 = self.beta
        limit = 2 / (1 - b2) - 1
        r = limit - 2 * t * b2**t / (1 - b2**t)
        eta = self.eta / (1 - b1**t)
        if r <= 4:
            return np.multiply(m, eta, out=dx)
        eta *= math.sqrt((r - 4) * (r - 2) * limit / ((limit - 4) * (limit - 2) * r))
        np.multiply(m, eta, out=dx)
        dx /= self.corrected_root(v, t)
        return dx


@dataclass(frozen=True)
class AdaMax(Adam):
    """AdaMax: m as in Adam, u = max(beta2 u, |g|), d = eta m / (1 - beta1^t) / (u + epsilon).

    Source: Kingma and Ba, Adam, 2015, section 7.1.
    """

    def init(self, x: np.ndarray) -> State:
        return {"mean": np.zeros_like(x), "largest": np.zeros_like(x)}

    def apply(self, state: State, x: np.ndarray, dx: np.ndarray, t: int) -> np.ndarray:
        m, u = state["mean"], state["largest"]
        _decayed(m, self.beta[0], dx)
        u *= self.beta[1]
        np.maximum(u, np.abs(dx), out=u)
        np.multiply(m, self.eta / (1 - self.beta[0] ** t), out=dx)
        dx /= u + self.epsilon
        return dx


@dataclass(frozen=True)
class OAdam(Adam):
    """Optimistic Adam: with a Adam's step at t, d = 2 a_t - a_(t-1).

    Source: Daskalakis et al., Training GANs with optimism, 2018.
    """

    beta: Betas = (0.5, 0.9)

    def init(self, x: np.ndarray) -> State:
        return {**super().init(x), "last": np.zeros_like(x)}

    def apply(self, state: State, x: np.ndarray, dx: np.ndarray, t: int) -> np.ndarray:
        step = super().apply(state, x, dx, t)
        last = state["last"]
        optimistic = 2 * step
        optimistic -= last
        last[...] = step
        return optimistic


@dataclass(frozen=True)
class AdaBelief(Adam):
    """AdaBelief: m as in Adam, v = beta2 v + (1 - beta2) (g - m)^2 + epsilon, d as in Adam.

    Source: Zhuang et al., AdaBelief optimizer, 2020.
    """

    epsilon: float = 1e-16

    def apply(self, state: State, x: np.ndarray, dx: np.ndarray, t: int) -> np.ndarray:
        m, v = state["mean"], state["square"]
        _decayed(m, self.beta[0], dx)
        dx -= m
        _decayed_square(v, self.beta[1], dx)
        v += self.epsilon
        np.multiply(m, self.eta / (1 - self.beta[0] ** t), out=dx)
        dx /= self.corrected_root(v, t)
        return dx


@dataclass(frozen=True)
class WeightDecay(Elementwise):
    """L2 penalty, before another rule in a chain: d = g + lambda_ x.

    It adds lambda_ / 2 * sum(x^2) to the loss.  Behind Adam see `AdamW`.
    """

    lambda_: Number = 5e-4

    def apply(self, state: State, x: np.ndarray, dx: np.ndarray, t: int) -> np.ndarray:
        dx += self.lambda_ * x
        return dx


@dataclass(frozen=True)
class SignDecay(Elementwise):
    """L1 penalty, before another rule in a chain: d = g + lambda_ sign(x)."""

    lambda_: Number = 1e-3

    def apply(self, state: State, x: np.ndarray, dx: np.ndarray, t: int) -> np.ndarray:
        dx += self.lambda_ * np.sign(x)
        return dx


@dataclass(frozen=True)
class ClipGrad(Elementwise):
    """Clips every element: d = min(max(g, -delta), delta)."""

    delta: Number = 10.0

    def apply(self, state: State, x: np.ndarray, dx: np.ndarray, t: int) -> np.ndarray:
        return np.clip(dx, -self.delta, self.delta, out=dx)


@dataclass(frozen=True)
class ClipNorm(Elementwise):
    """Clips the norm of the whole gradient: d = g min(1, omega / norm), over all parameters.

    p          the norm's order: 2, 1, math.inf or any positive number
    per_array  True takes each parameter by itself, as Optimisers.jl does
    throw      False lets a norm that is not finite pass

    Parameters that are frozen or have no gradient do not count.  `update` raises
    `FloatingPointError` for a norm that is NaN or infinite; the parameters stay as they were.

    Source: Pascanu, Mikolov and Bengio, On the difficulty of training RNNs, 2013.
    """

    omega: Number = 10.0
    p: float = 2
    per_array: bool = field(default=False, kw_only=True)
    throw: bool = field(default=True, kw_only=True)

    @property
    def elementwise(self) -> bool:  # type: ignore[override]
        return not self.per_array

    def apply(self, state: State, x: np.ndarray, dx: np.ndarray, t: int) -> np.ndarray:
        dx *= self.factor(self.norm([dx]))
        return dx

    def norm(self, arrays: Iterable[np.ndarray]) -> float:
        """The norm of all arrays taken as one vector."""
        return _norm(np.array([_norm(a.ravel(order="K"), self.p) for a in arrays]), self.p)

    def factor(self, norm: float) -> float:
        """What every gradient is multiplied by."""
        if not math.isfinite(norm) and self.throw:
            raise FloatingPointError(
                f"ClipNorm: the gradient's {self.p:g}-norm is {norm}. The parameters were not "
                "changed. ClipNorm(throw=False) lets it pass."
            )
        return min(1.0, self.omega / norm) if norm > 0 else 1.0


def _norm(g: np.ndarray, p: float) -> float:
    """The p-norm of a vector, also where its square overflows or underflows."""
    if not g.size:
        return 0.0
    if p == 2:
        square = _sum_of_squares(g)
        if _SAFE[g.dtype.char] < square < math.inf:
            return math.sqrt(square)
    largest = float(max(g.max(), -g.min()))
    if p == math.inf or largest == 0 or not math.isfinite(largest):
        return largest
    scaled = np.abs(g / largest)
    return largest * float((scaled if p == 1 else scaled**p).sum()) ** (1 / p)


def _sum_of_squares(g: np.ndarray) -> float:
    if g.dtype in (np.float32, np.float64) and g.flags.aligned and g.flags.contiguous:
        return _kernels.sum_of_squares(g)  # BLAS would wake its own threads, which then spin
    with np.errstate(over="ignore"):
        return float(np.dot(g, g))


# Squares below this may have lost digits to underflow.
_SAFE = {c: float(np.finfo(c).tiny / np.finfo(c).eps) for c in "efdg"}


class OptimiserChain(Rule):
    """Rules one after the other: each gets what the one before made of the gradient.

    `OptimiserChain(ClipNorm(1.0), WeightDecay(1e-4), Adam())`; a chain in a chain is part of it,
    and an empty one subtracts the gradient itself.
    """

    def __init__(self, *rules: Rule) -> None:
        for rule in rules:
            if not isinstance(rule, Rule):
                raise TypeError(f"OptimiserChain: {rule!r} is no rule.")
        self.rules = tuple(one for rule in rules for one in flattened(rule))

    def __repr__(self) -> str:
        return f"OptimiserChain({', '.join(map(repr, self.rules))})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OptimiserChain) and self.rules == other.rules

    def __hash__(self) -> int:
        return hash(self.rules)


def flattened(rule: Rule) -> tuple[Rule, ...]:
    """The rules that a rule is made of."""
    return rule.rules if isinstance(rule, OptimiserChain) else (rule,)
