"""`explain`: in words, what a model's recurrent layers will do next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from recur.cells import KernelCell
from recur.module import is_active, named_params
from recur.recurrent import layers_of
from recur.recurrent.recur import Recur
from recur.recurrent.state import named_leaves
from recur.regularise.weight_drop import Dropped
from recur.tape import Param, Tensor, current, peek


class Explained(NamedTuple):
    """What is so of one recurrent layer, in words."""

    path: str
    layer: str
    state: str
    init: str
    stop: str  # where the gradient of the next loss stops, going back through this layer's state
    weights: tuple[str, ...]  # those that get gradient
    constant: tuple[str, ...]
    dropped: tuple[str, ...]
    frozen: tuple[str, ...]

    def __str__(self) -> str:
        rows = [
            ("state", self.state),
            ("init", self.init),
            ("gradient", f"stops {self.stop}"),
            ("weights", f"gradient goes to {_listed(self.weights)}"),
            ("constant", ", ".join(self.constant)),
            ("dropped", ", ".join(self.dropped)),
            ("frozen", ", ".join(self.frozen)),
        ]
        title = f"{self.path}: {self.layer}" if self.path else self.layer
        return "\n".join([title, *(f"  {name:9} {words}" for name, words in rows if words)])


class Explanation(list[Explained]):
    """One `Explained` for each recurrent layer; printing it gives all in words."""

    def __str__(self) -> str:
        return "\n".join(map(str, self)) if self else "The model has no recurrent layer."

    __repr__ = __str__


def explain(model: Any, opt: Any = None) -> Explanation:
    """For each recurrent layer in words: its state, its init, where the next gradient stops, which
    weights get gradient, and which are constant, dropped or frozen.

    opt  what `setup` gave for this model: parameters that it has frozen are named then.  They get
         gradient, but no update

    Nothing is stepped, drawn or changed.  Inside a scope the history that a state has is told too.
    """
    frozen = set() if opt is None else _frozen(opt, model)
    return Explanation(_explained(path, layer, frozen) for path, layer in layers_of(model).items())


def _frozen(opt: Any, model: Any) -> set[int]:
    saved = opt.state_dict()["params"]
    return {id(p) for path, p in named_params(model).items() if saved[path]["frozen"]}


def _explained(path: str, layer: Recur, frozen: set[int]) -> Explained:
    inits = dict(named_leaves(layer.init, "init"))
    params = named_params(layer)
    weights = {name.removeprefix("cell."): p for name, p in params.items() if name not in inits}
    return Explained(
        path=path,
        layer=layer.title,
        state=_state(layer),
        init=_init(inits),
        stop=_stop(layer, inits),
        weights=tuple(weights),
        constant=tuple(_constants(layer)),
        dropped=tuple(_dropped(layer)),
        frozen=tuple(name.removeprefix("cell.") for name, p in params.items() if id(p) in frozen),
    )


# ---------------------------------------------------------------------- states


def _state(layer: Recur) -> str:
    if layer.at_start:
        return "at the start: the next step begins from init"
    leaves = [leaf for _, leaf in named_leaves(layer.state, "")]
    batch = layer.describe_state().removeprefix("state: ")
    carried = "carried" if batch == "carried" else f"carried, {batch}"
    nodes, _, used = _history(leaves)
    if used:
        return f"{carried}, with a history that was swept already"
    if nodes:
        return f"{carried}, with a history of {_operations(nodes)}"
    tape = current()
    if tape is not None and any(stepped is layer for stepped in tape.layers()):
        return f"{carried}, as a value: its history was cut in this scope"
    return f"{carried}, as a value"


def _init(inits: Mapping[str, Any]) -> str:
    learned = [path for path, leaf in inits.items() if type(leaf) is Param]
    if len(learned) == len(inits):
        return "a parameter"
    values = [peek(leaf) for leaf in inits.values()]
    numbers = "zeros" if not any(np.any(v) for v in values if _is_numeric(v)) else "fixed numbers"
    if learned:
        return f"{_listed(learned)} is a parameter, the rest a constant"
    return f"a constant ({numbers}); learn_init=True makes it a parameter"


def _is_numeric(x: Any) -> bool:
    return isinstance(x, (int, float, np.ndarray, np.generic))


def _stop(layer: Recur, inits: Mapping[str, Any]) -> str:
    learned = [path for path, leaf in inits.items() if type(leaf) is Param]
    if layer.at_start:
        if layer.init_grad == "scope" and not (current() and layer._is_linked()):
            return (
                "where the scope begins: grads.state(layer) has that state's gradient, and init "
                "gets one only after a reset inside the scope"
            )
        return f"at init, whose {_listed(learned)} gets it" if learned else "at init, a constant"
    leaves = [leaf for _, leaf in named_leaves(layer.state, "")]
    nodes, params, used = _history(leaves)
    if used:
        return (
            "with an error: steps behind the state were swept already. Call truncate(model) or "
            "reset(model) first, or sweep with keep_graph=True"
        )
    if not nodes:
        return "at the state, which is a value: it reaches no earlier step, earlier input or init"
    reached = [path for path, leaf in inits.items() if any(leaf is p for p in params)]
    end = f"at init, whose {_listed(reached)} gets it" if reached else "at a value"
    return f"{end}, {_operations(nodes)} back"


def _operations(nodes: list[Any]) -> str:
    return f"{len(nodes)} recorded operation{'s' * (len(nodes) != 1)}"


def _history(leaves: list[Any]) -> tuple[list[Any], list[Param], bool]:
    """The nodes behind a state, the parameters among their inputs, and whether any was swept."""
    pending = [leaf.node for leaf in leaves if isinstance(leaf, Tensor) and leaf.live]
    nodes: dict[int, Any] = {}
    params: list[Param] = []
    used = False
    while pending:
        node = pending.pop()
        if id(node) in nodes:
            continue
        nodes[id(node)] = node
        used |= node.op is None
        for x in node.inputs or ():
            if isinstance(x, Param):
                params.append(x)
            elif x is not None:
                pending.append(x.node)
    return list(nodes.values()), params, used


# ---------------------------------------------------------------------- weights


def _constants(layer: Recur) -> list[str]:
    """Weights of our cells that are no parameters."""
    cell = layer.cell
    if not isinstance(cell, KernelCell):
        return []
    held = {name: vars(cell).get(name) for name in cell.weight_names}
    return [name for name, w in held.items() if w is not None and type(w) is not Param]


def _dropped(layer: Recur) -> list[str]:
    computed = getattr(layer.cell, "computed_weights", {})
    return [
        f"{name} (p = {how.masks.p:g}, {_when(how.masks)})"
        for name, how in computed.items()
        if isinstance(how, Dropped)
    ]


def _when(masks: Any) -> str:
    if masks.active is None:
        return "active inside a scope" if current() is None else "active"
    return "active" if is_active(masks) else "inactive"


def _listed(names: Any) -> str:
    *most, last = names or ["nothing"]
    return f"{', '.join(most)} and {last}" if most else str(last)
