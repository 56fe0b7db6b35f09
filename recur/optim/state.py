"""`setup`, `update`, `adjust`, `freeze`, `thaw`: rules applied to the parameters of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from recur.errors import ShapeError, StateError
from recur.module import named_params, numeric
from recur.optim.plan import Leaf, Plan
from recur.optim.rules import Number, OptimiserChain, Rule, flattened
from recur.tape import Param, peek


class OptimiserPart:
    """The optimiser's side of one part of a model: `opt.layers[0]`, `opt["layers.0"]`.

    `adjust`, `freeze` and `thaw` take it.
    """

    def __init__(self, opt: OptimiserState, path: str) -> None:
        self._opt = opt
        self._path = path

    def __getattr__(self, name: str) -> OptimiserPart:
        if name.startswith("_"):
            raise AttributeError(name)
        return _part(self._opt, self._path, name, AttributeError)

    def __getitem__(self, key: str | int) -> OptimiserPart:
        return _part(self._opt, self._path, str(key), KeyError)

    def __repr__(self) -> str:
        lines = [_line(leaf) for leaf in _leaves(self)]
        return "\n".join([f"{self._path}: {len(lines)} parameters", *lines])


class OptimiserState:
    """The state of an optimiser for each parameter of a model, by the parameter's path.

    Made by `setup`.  `opt.layers[0].cell` is the part of it that belongs to that part of the model.
    """

    def __init__(self, rule: Rule, params: Mapping[str, Param]) -> None:
        self._rule = rule
        rules = flattened(rule)
        self._by_path = {path: Leaf(path, p, rules) for path, p in params.items()}
        self._by_param = {id(leaf.param): leaf for leaf in self._by_path.values()}
        self._step = 0
        self._plan: Plan | None = None

    def __getattr__(self, name: str) -> OptimiserPart:
        if name.startswith("_"):
            raise AttributeError(name)
        return _part(self, "", name, AttributeError)

    def __getitem__(self, key: str | int) -> OptimiserPart:
        return _part(self, "", str(key), KeyError)

    def __repr__(self) -> str:
        lines = map(_line, self._by_path.values())
        return "\n".join([f"OptimiserState({self._rule}), {self._step} updates", *lines])

    def __getstate__(self) -> dict[str, Any]:
        # A plan holds views of the parameters' memory, which a copy does not share.
        return {**self.__dict__, "_plan": None, "_by_param": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._by_param = {id(leaf.param): leaf for leaf in self._by_path.values()}

    def state_dict(self) -> dict[str, Any]:
        """All that `update` goes on from: copies of arrays, numbers, strings, in dicts and lists.

        Schedules are code and not in it: set up the same rule before `load_state_dict`.
        """
        return {
            "rules": [type(rule).__name__ for rule in flattened(self._rule)],
            "step": self._step,
            "params": {path: leaf.saved() for path, leaf in self._by_path.items()},
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` gave, hyperparameters and frozen parts included.

        Raises `StateError` if the rules or the parameters' paths are others, `ShapeError` if a
        shape is; nothing is changed then.
        """
        rules = [type(rule).__name__ for rule in flattened(self._rule)]
        if list(saved["rules"]) != rules:
            raise StateError(
                f"load_state_dict: the saved optimiser is {' + '.join(saved['rules'])}, this one "
                f"{' + '.join(rules)}. Nothing was changed."
            )
        theirs = saved["params"]
        odd = [path for path in self._by_path if path not in theirs]
        odd += [path for path in theirs if path not in self._by_path]
        if odd:
            raise StateError(
                f"load_state_dict: only one side has {', '.join(odd[:5])}. Nothing was changed. "
                "Set the optimiser up with a model of the same make."
            )
        for path, leaf in self._by_path.items():
            leaf.check(theirs[path])
        loaded: dict[Any, tuple[Rule, ...]] = {}
        for path, leaf in self._by_path.items():
            key = id(leaf.rules), repr(theirs[path]["hyperparameters"])
            leaf.load(theirs[path])
            # Leaves that are alike share one tuple: they are then updated together.
            leaf.rules = loaded.setdefault(key, leaf.rules)
        self._step = int(saved["step"])
        self._plan = None


def setup(rule: Rule, model: Any) -> OptimiserState:
    """The state of `rule` for every parameter of `model`, to be given to `update`.

    model  a model, or `params(model)`.  A parameter met twice has one state

    Raises `TypeError` if `rule` is not a rule, `StateError` if the model has no parameters.
    """
    if not isinstance(rule, Rule):
        raise TypeError(f"setup: {rule!r} is no rule. The rule comes first: setup(Adam(), model).")
    found = named_params(model)
    if not found:
        raise StateError(f"setup: {type(model).__name__} has no parameters.")
    return OptimiserState(rule, found)


def update(opt: OptimiserState, model: Any, grads: Any = None) -> None:
    """Subtracts one step of the optimiser from the parameters of `model`, in place.

    model  what `opt` was set up with, or a part of it
    grads  the result of `gradient(f, model)`; or a dict of arrays by path or by parameter; or None,
           which takes each parameter's `.grad`.  A parameter whose gradient is missing or None, or
           that is frozen, keeps its value and its state.  Zeros are a gradient like any other.
           Never written to

    Raises `StateError` for parameters that `opt` does not know and for gradients of none of the
    model's, `ShapeError` for a gradient of another shape; nothing is changed then.
    """
    if not isinstance(opt, OptimiserState):
        raise TypeError(
            f"update: {opt!r} is not the state of an optimiser. "
            "Call opt = setup(rule, model) once, before the loop."
        )
    found = _gradients(opt, named_params(model), grads)
    pairs = [(leaf, grad) for leaf, grad in found if not leaf.frozen]
    if not pairs:
        return
    leaves = [leaf for leaf, _ in pairs]
    if opt._plan is None or not opt._plan.serves(leaves):
        opt._plan = Plan(leaves)
    opt._plan.run([grad for _, grad in pairs], opt._step)
    opt._step += 1


def _gradients(
    opt: OptimiserState, params: Mapping[str, Param], grads: Any
) -> Iterator[tuple[Leaf, np.ndarray]]:
    """The gradients there are, each with the state of its parameter."""
    if isinstance(grads, tuple):
        raise TypeError(
            "update: the gradients are a tuple, one for each argument of gradient(). "
            "Pass the one that belongs to the model, for example grads[0]."
        )
    if isinstance(grads, Mapping):
        _check_known(params, grads)
    elif grads is not None and params and not any(p in grads for p in params.values()):
        raise StateError(
            "update: the gradients are those of another model: none belongs to a parameter of "
            "this one. Nothing was changed."
        )
    for path, p in params.items():
        leaf = opt._by_param.get(id(p))
        if leaf is None:
            raise StateError(
                f"update: the optimiser was not set up with the parameter {path}. Nothing was "
                "changed. Call setup(rule, model) again after a parameter of the model was "
                "replaced, converted or copied."
            )
        grad = _gradient(grads, path, p)
        if grad is None:
            continue
        if not isinstance(grad, np.ndarray) or grad.dtype.kind not in "biuf":
            grad = numeric(f"update: the gradient of {path}", grad)
        if grad.shape != p.shape:
            raise ShapeError(
                f"update: the gradient of {path} has shape {grad.shape}, expected {p.shape}. "
                "Nothing was changed."
            )
        yield leaf, grad


def _gradient(grads: Any, path: str, p: Param) -> Any:
    if grads is None:
        return p.grad
    if isinstance(grads, Mapping):
        return peek(grads.get(path, grads.get(p)))
    return grads[p] if p in grads else None


def _check_known(params: Mapping[str, Param], grads: Mapping[Any, Any]) -> None:
    for key in grads:
        if not (key in params if isinstance(key, str) else any(key is p for p in params.values())):
            raise StateError(
                f"update: there is a gradient of {key!r}, which is no parameter of the model. "
                "Nothing was changed."
            )


def adjust(opt: Any, eta: Number | None = None, **hyperparameters: Any) -> Any:
    """Changes hyperparameters for the updates to come; the rest of the state stays.

    opt  what `setup` gave or a part of it (`opt.layers[0]`), changed in place; or a rule, which
         stays as it is

    `adjust(opt, 1e-4)` sets the learning rate of every rule that has one, `adjust(opt, beta=...)`
    another hyperparameter by its name; a schedule will do for a number.  Returns `opt`, or the new
    rule.  Raises `TypeError` if no rule has a hyperparameter of that name; nothing is changed then.
    """
    new = dict(hyperparameters)
    if eta is not None:
        new["eta"] = eta
    if isinstance(opt, OptimiserChain):
        return OptimiserChain(*_adjusted(opt.rules, new))
    if isinstance(opt, Rule):
        return _adjusted((opt,), new)[0]
    leaves = _leaves(opt)
    changed = {id(rules): _adjusted(rules, new) for rules in (leaf.rules for leaf in leaves)}
    for leaf in leaves:
        leaf.rules = changed[id(leaf.rules)]
    whole(opt)._plan = None
    return opt


def _adjusted(rules: tuple[Rule, ...], new: Mapping[str, Any]) -> tuple[Rule, ...]:
    held = {name for rule in rules for name in rule.hyperparameters()}
    for name in new:
        if name not in held or name in _FIXED:
            raise TypeError(
                f"adjust: {' + '.join(type(rule).__name__ for rule in rules)} has no "
                f"{name} that may change, only {', '.join(sorted(held - _FIXED))}."
            )
    return tuple(
        rule.with_(**{n: v for n, v in new.items() if n in rule.hyperparameters()})
        for rule in rules
    )


# What decides which arrays a rule keeps, over what it works, or what the model holds.
_FIXED = frozenset({"centred", "per_array", "swapped"})


def freeze(opt: Any, part: Any = None) -> None:
    """Leaves parameters out of `update` until `thaw`: neither they nor their state change.

    opt   what `setup` gave, or a part of it: `freeze(opt.layers[0])`
    part  a part of the model, or a parameter, instead: `freeze(opt, model.layers[0])`

    Raises `StateError` if the part holds a parameter that `opt` does not know, or none.
    """
    _set_frozen(opt, part, True)


def thaw(opt: Any, part: Any = None) -> None:
    """Undoes `freeze`, for the whole or a part."""
    _set_frozen(opt, part, False)


def _set_frozen(opt: Any, part: Any, frozen: bool) -> None:
    leaves = _leaves(opt)
    if part is not None:
        params = [part] if isinstance(part, Param) else list(named_params(part).values())
        by_param = {id(leaf.param): leaf for leaf in leaves}
        if not params or any(id(p) not in by_param for p in params):
            raise StateError(
                f"{'freeze' if frozen else 'thaw'}: {type(part).__name__} holds no parameters, or "
                "some that this optimiser was not set up with. Nothing was changed."
            )
        leaves = [by_param[id(p)] for p in params]
    for leaf in leaves:
        leaf.frozen = frozen
    whole(opt)._plan = None


def whole(opt: Any) -> OptimiserState:
    if isinstance(opt, OptimiserPart):
        return opt._opt
    if not isinstance(opt, OptimiserState):
        raise TypeError(
            f"{type(opt).__name__} is no optimiser state. Pass what setup(rule, model) gave, or a "
            "part of it such as opt.layers[0]."
        )
    return opt


def _leaves(opt: Any) -> Sequence[Leaf]:
    state = whole(opt)
    if not isinstance(opt, OptimiserPart):
        return list(state._by_path.values())
    return [leaf for path, leaf in state._by_path.items() if _inside(path, opt._path)]


def _inside(path: str, above: str) -> bool:
    return path == above or path.startswith(f"{above}.")


def _part(opt: OptimiserState, above: str, name: str, error: type[Exception]) -> OptimiserPart:
    path = f"{above}.{name}" if above else name
    if not any(_inside(known, path) for known in opt._by_path):
        raise error(f"the optimiser holds no parameter under {path!r}")
    return OptimiserPart(opt, path)


def _line(leaf: Leaf) -> str:
    rule = leaf.rules[0] if len(leaf.rules) == 1 else OptimiserChain(*leaf.rules)
    frozen = ", frozen" if leaf.frozen else ""
    return f"  {leaf.path}: {rule}, {leaf.count} updates{frozen}"
