"""`WeightDrop`: dropout on the weights of any layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from recur.errors import ShapeError, StateError
from recur.layers.containers import accepted
from recur.layers.dropout import probability
from recur.module import (
    Module,
    is_active,
    label,
    named_params,
    numeric,
    raw_name,
    register,
    shape_after,
    transaction,
    walk,
)
from recur.regularise.masks import WindowMasks, scaled
from recur.tape import Node, Op, Param, Sweep, current, peek, protected, record_one, traced


class _Drop(Op):
    """raw * factor.  Lasting, for every loss of a scope may have used the weight."""

    __slots__ = ()
    lasting = True

    def backward(self, sweep: Sweep, node: Node, grads: dict[int, np.ndarray]) -> None:
        assert node.inputs is not None
        sweep.add(node.inputs[0], grads[0] * node.saved, own=True)


_DROP = _Drop("weight_drop")


class _Product(NamedTuple):
    """A dropped weight, in which scope and of what it was made; with the mask that still serves."""

    scope: Any
    raw_id: int
    version: int
    raw: Any  # lest another object get its id
    weight: Any


class WeightMasks(WindowMasks):
    """The masks of one `WeightDrop`, and the dropped weights of the scope that is open.

    p            probability that an entry is dropped
    shapes       the shape of the mask that is drawn for each weight, by the weight's path
    """

    transient = frozenset({"_products"})

    def __init__(
        self,
        p: float,
        shapes: dict[str, tuple[int, ...]],
        active: bool | None,
        rng: np.random.Generator | None,
    ) -> None:
        super().__init__(active, rng)
        self.p = p
        self.shapes = shapes
        self.fixed: dict[str, np.ndarray] = {}
        self.used: dict[str, np.ndarray] = {}  # the last mask of each weight
        self._products: dict[str, _Product] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._products = {}

    def fields(self) -> list[tuple[str, Any]]:
        return []  # parameters belong to the layer, not to what was made of them

    def buffers(self) -> dict[str, np.ndarray]:
        """The masks that were fixed, by the weight's path; they are saved with the model."""
        return dict(self.fixed)

    def load_buffers(self, new: dict[str, np.ndarray]) -> None:
        """Fixes masks of the shapes of those that are fixed."""
        for path, mask in new.items():
            self.fix(path, np.array(mask))

    def fix(self, path: str, mask: np.ndarray | None) -> None:
        """Lets `mask` serve from now on, or goes back to drawing."""
        self.fixed.pop(path, None)
        if mask is not None:
            self.fixed[path] = mask
        self.changed()

    def weight(self, path: str, raw: Any) -> Any:
        """The weight at `path`, made of the parameter `raw`: `raw` itself if nothing is dropped."""
        if not is_active(self):
            return raw
        tape, version = current(), raw.version if type(raw) is Param else 0
        held = self._products.get(path)
        if held is not None and held[:3] == (tape, id(raw), version):
            return held.weight
        mask = self._mask(path)
        if mask is None:
            return raw
        self.used[path] = mask
        weight = self._product(raw, mask)
        self._products[path] = _Product(tape, id(raw), version, raw, weight)
        if tape is not None:
            tape.stepped(self)
        return weight

    def _mask(self, path: str) -> np.ndarray | None:
        """The mask that serves now, drawn if there is none; None if nothing is to be dropped."""
        mask = self.fixed.get(path)
        if mask is None and self.p > 0:
            mask = self.held(path)
            if mask is None:
                # All at once: they must not depend on which weight a layer reads first.
                drawn = {path: self.draw(self.p, shape) for path, shape in self.shapes.items()}
                self.hold(drawn)
                mask = drawn[path]
        return mask

    def _product(self, raw: Any, mask: np.ndarray) -> Any:
        value = peek(raw)
        factor = scaled(mask, self.p, value.dtype)
        product = np.multiply(value, factor, out=np.empty_like(value))
        source = None if current() is None else traced(raw)
        return product if source is None else record_one(_DROP, (source,), product, factor)

    def changed(self) -> None:
        self._products = {}

    def forget_history(self) -> None:
        """Lets the weights of a scope go; the tape calls this when it ends."""
        self._products = {}


class Dropped(NamedTuple):
    """How one weight is computed: which masks, and its path in the layer that they are for."""

    masks: WeightMasks
    path: str

    def weight(self, raw: Any) -> Any:
        return self.masks.weight(self.path, raw)


@register("WeightDrop")
class WeightDrop(Module):
    """W = raw * mask / (1 - p) for some weights of a layer; each entry of mask is 0 with
    probability p (Wan et al. 2013; on recurrent weights, one mask a window: Merity, Keskar and
    Socher 2018).

    layer  any layer.  It is taken over as it is, and goes on working on its own
    names  which parameters: a path in the layer ("cell.Wh"), or its end ("Wh") if only one has it
    p      from 0 to 1; 0 drops nothing and draws nothing
    variational  one value of the mask for a row of the weight, instead of one for each entry

    The parameter, which optimisers, files and `params` see, is the raw array, now named
    `<name>_raw`; the layer owns it.  The weight under the old name is computed from it: once per
    scope and again when the raw array was written.  Gradient passes from there to the raw array,
    where mask is 0 exactly zero.  Assigning to either name writes the raw array.

    A mask is drawn at the first step of a scope and serves until its end, also across `truncate`;
    `reset(model)` and `resample(model)` let the next step draw a new one.  Inactive (outside a
    scope; see `trainmode` and `testmode`), W = raw.  Masks come from `generator`, spawned from
    `rng`.

    A call, its arguments and its result are those of the layer.  `remove()` gives the plain layer
    back.  Raises `ValueError` for p, `StateError` for names that fit no parameter or several.
    """

    positional = ("layer", "names", "p")

    def __init__(
        self,
        layer: Any,
        names: str | Iterable[str] = "Wh",
        p: float = 0.5,
        variational: bool = False,
        *,
        active: bool | None = None,
        rng: np.random.Generator | None = None,
    ) -> None:
        p = probability("WeightDrop", p)
        names = (names,) if isinstance(names, str) else tuple(names)
        found = {_path_of(layer, name): None for name in names}
        places = [(path, *_owner(layer, path)) for path in found]
        self.layer = layer
        self.variational = variational
        shapes = {
            path: _mask_shape(getattr(owner, name).shape, variational)
            for path, owner, name in places
        }
        self.masks = WeightMasks(p, shapes, active, rng)
        for path, owner, name in places:
            owner.compute_weight(name, Dropped(self.masks, path))

    @property
    def p(self) -> float:
        """The probability that an entry of a weight is dropped."""
        return self.masks.p

    @property
    def names(self) -> tuple[str, ...]:
        """The paths of the dropped weights in the layer."""
        return tuple(self.masks.shapes)

    @property
    def generator(self) -> np.random.Generator:
        """Where masks are drawn from."""
        return self.masks.generator

    def fields(self) -> list[tuple[str, Any]]:
        return [("masks", self.masks), ("layer", self.layer)]

    def parts(self) -> list[tuple[str, Any]]:
        return [("", self.layer)]

    # ------------------------------------------------------------ calling

    @property
    def takes_lists(self) -> bool:  # type: ignore[override]
        return getattr(self.layer, "takes_lists", False)

    @property
    def initial_state(self) -> Any:
        """That of the layer, if it is a cell."""
        return self.layer.initial_state

    def accepts(self) -> frozenset[str]:
        """Which step options a call takes: those of the layer."""
        return accepted(self.layer)

    def __call__(self, *xs: Any, **options: Any) -> Any:
        with transaction():
            return self.layer(*xs, **options)

    def output_shape(self, *shapes: tuple[int, ...]) -> tuple[int, ...]:
        return shape_after(self.layer, *shapes)

    # ------------------------------------------------------------ masks

    def raw(self, name: str) -> Any:
        """The parameter from which a weight is computed."""
        owner, attribute = _owner(self.layer, self._path(name))
        return getattr(owner, raw_name(attribute))

    def mask(self, name: str) -> np.ndarray | None:
        """The mask of the last step that dropped something, read-only; None before the first."""
        mask = self.masks.used.get(self._path(name))
        return None if mask is None else protected(mask)

    def set_mask(self, name: str, mask: Any) -> None:
        """Fixes a mask, through scopes and resets, until `set_mask(name, None)`.

        mask  broadcasts to the weight; copied.  It is saved with the model, as a buffer

        Raises `ShapeError` if it does not fit.
        """
        path = self._path(name)
        if mask is not None:
            shape = self.raw(name).shape
            mask = numeric(f"WeightDrop: the mask of {name}", mask)
            if mask.ndim != len(shape) or any(
                n not in (1, full) for n, full in zip(mask.shape, shape, strict=True)
            ):
                raise ShapeError(
                    f"{self!r}: the mask of {name} has shape {mask.shape}, expected {shape} or 1 "
                    "for an axis along which it is constant. Nothing was changed."
                )
            mask = np.array(mask)
        self.masks.fix(path, mask)

    def remove(self) -> Any:
        """The plain layer: its weights are the raw parameters under their old names."""
        for path in self.names:
            owner, name = _owner(self.layer, path)
            owner.restore_weight(name)
        self.masks.shapes = {}
        self.masks.fixed = {}
        return self.layer

    def computes(self) -> list[tuple[Module, str]]:
        return [_owner(self.layer, path) for path in self.names]

    def _path(self, name: str) -> str:
        for path in self.names:
            if path == name or path.endswith(f".{name}"):
                return path
        raise StateError(
            f"{self!r}: {name!r} is not one of its weights, {', '.join(self.names) or 'none'}."
        )

    # ------------------------------------------------------------ description

    def describe(self) -> str:
        return f"WeightDrop({label(self.layer)}, {', '.join(self.names)}, p={self.p:g})"

    def config(self) -> dict[str, Any]:
        return {
            "layer": self.layer,
            "names": list(self.names),
            "p": self.p,
            "variational": self.variational,
            "active": self.masks.active,
            "fixed": {path: list(mask.shape) for path, mask in self.masks.fixed.items()},
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], version: int) -> WeightDrop:
        """A new layer; masks that were fixed have their shapes, and values of no meaning."""
        options = dict(config)
        shapes = options.pop("fixed", {})
        layer = cls(**options)
        for name, shape in shapes.items():
            layer.set_mask(name, np.broadcast_to(np.uint8(1), shape))  # no memory, whatever it says
        return layer


def _path_of(layer: Any, name: str) -> str:
    """The path of the one parameter of a layer that `name` means."""
    paths = list(named_params(layer))
    found = [path for path in paths if path == name or path.endswith(f".{name}")]
    if len(found) == 1:
        return found[0]
    if found:
        raise StateError(
            f"WeightDrop: {name!r} fits several parameters of {label(layer)}: {', '.join(found)}. "
            "Give the whole path. Nothing was changed."
        )
    dropped = any(path.endswith(raw_name(name)) for path in paths)
    hint = " It is dropped already." if dropped else ""
    raise StateError(
        f"WeightDrop: {label(layer)} has no parameter {name!r}, it has {', '.join(paths)}.{hint} "
        "Nothing was changed."
    )


def _owner(layer: Any, path: str) -> tuple[Module, str]:
    """The layer that has the weight at `path` as an attribute, and the attribute's name."""
    above, _, name = path.rpartition(".")
    owner = dict(walk(layer))[above]
    if not isinstance(owner, Module) or not (
        owner.holds_param(name) or name in owner.computed_weights
    ):
        raise StateError(
            f"WeightDrop: {path} of {label(layer)} is no attribute of a Module, so reading it "
            "cannot be turned into computing it. Make it one. Nothing was changed."
        )
    return owner, name


def _mask_shape(shape: tuple[int, ...], variational: bool) -> tuple[int, ...]:
    return (shape[0], *(1,) * (len(shape) - 1)) if variational else tuple(shape)
