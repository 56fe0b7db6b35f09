"""Everything that a model is made of is found, once, in order."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections import OrderedDict, deque, namedtuple
from typing import Any

import numpy as np
import pytest

from recur import GRU, reset, testmode, truncate
from recur.errors import StateError
from recur.module import Module, modules, named_params, params, ties, walk
from recur.tape import Param, Tape


class Leaf(Module):
    def __init__(self, n: int = 2) -> None:
        self.w = Param(np.zeros(n, np.float32))


@dataclasses.dataclass
class Record:
    first: Any
    second: Any = None


class Slotted:
    __slots__ = ("__hidden", "empty", "shown")

    def __init__(self, shown: Any, hidden: Any) -> None:
        self.shown, self.__hidden = shown, hidden


class SlottedFurther(Slotted):
    __slots__ = "more"

    def __init__(self, shown: Any, hidden: Any, more: Any) -> None:
        super().__init__(shown, hidden)
        self.more = more


class Plain:
    def __init__(self, layer: Leaf) -> None:
        self.layer = layer

    def loss(self) -> None: ...


Pair = namedtuple("Pair", "left right")


def closure_over(layer):
    def loss():
        return layer

    return loss


def closure_not_yet_filled():
    def loss():
        return later

    if False:
        later = None
    return loss


def default_of(layer):
    return lambda x, m=layer: m


def keyword_default_of(layer):
    def loss(x, *, m=layer):
        return m

    return loss


def decorated(layer):
    inner = closure_over(layer)

    @functools.wraps(inner)
    def outer():
        return None

    return outer


@pytest.mark.parametrize(
    ("holder", "path"),
    [
        (lambda leaf: [0, leaf], "1.w"),
        (lambda leaf: (leaf,), "0.w"),
        (lambda leaf: Pair(None, leaf), "right.w"),
        (lambda leaf: {"enc": leaf}, "enc.w"),
        (lambda leaf: {3: leaf}, "3.w"),
        (lambda leaf: OrderedDict(a=leaf), "a.w"),
        (lambda leaf: types.MappingProxyType({"a": leaf}), "a.w"),
        (lambda leaf: deque([0, leaf]), "1.w"),
        (lambda leaf: Record(1, leaf), "second.w"),
        (lambda leaf: types.SimpleNamespace(m=leaf), "m.w"),
        (lambda leaf: Slotted(leaf, None), "shown.w"),
        (lambda leaf: Slotted(None, leaf), "_Slotted__hidden.w"),
        (lambda leaf: SlottedFurther(None, None, leaf), "more.w"),
        (lambda leaf: functools.partial(print, leaf), "args.0.w"),
        (lambda leaf: functools.partial(print, end=leaf), "keywords.end.w"),
        (lambda leaf: functools.partial(closure_over(leaf)), "func.layer.w"),
        (closure_over, "layer.w"),
        (default_of, "__defaults__.0.w"),
        (keyword_default_of, "__kwdefaults__.m.w"),
        (decorated, "__wrapped__.layer.w"),
        (lambda leaf: Plain(leaf).loss, "__self__.layer.w"),
    ],
)
def test_a_parameter_is_found_in_every_kind_of_holder(holder, path):
    leaf = Leaf()
    found = named_params(holder(leaf))
    assert list(found) == [path]
    assert found[path] is leaf.w


@pytest.mark.parametrize(
    "hold",
    [
        lambda part: {part},
        lambda part: frozenset([("a", part)]),
        lambda part: {frozenset([closure_over(part)])},
    ],
)
@pytest.mark.parametrize("part", [Leaf(), Leaf().w], ids=["layer", "parameter"])
def test_a_layer_or_parameter_that_only_a_set_holds_is_refused(hold, part):
    with pytest.raises(StateError, match=r"^inside\.1: a set holds .*Leaf.*Use a list or a dict"):
        named_params({"inside": [Leaf(), hold(part)]})


@pytest.mark.parametrize("act", [reset, truncate, params, testmode])
def test_what_acts_on_a_model_refuses_a_set_of_layers_and_changes_nothing(act):
    first, second = GRU(2, 3), GRU(2, 3)
    for layer in (first, second):
        layer(np.ones((2, 1)))
    model = types.SimpleNamespace(first=first, others={second})
    with pytest.raises(StateError, match="others: a set holds"):
        act(model)
    assert not first.at_start and not second.at_start


def test_a_set_may_hold_what_is_found_elsewhere_and_what_is_no_layer():
    leaf = Leaf()
    holder = types.SimpleNamespace(active={leaf, leaf.w}, names={"a", ("b", 2)}, layers=[leaf])
    holder.seen = {closure_over(holder)}
    assert list(named_params(holder)) == ["layers.0.w"]


def test_a_bare_parameter_has_the_empty_path():
    p = Param(np.zeros(2))
    assert named_params(p) == {"": p}


def test_classes_modules_arrays_tapes_tensors_and_generators_are_not_gone_into():
    class Holder:
        inside = Leaf()

    def generator(layer):
        yield layer

    objects = np.empty(1, object)
    objects[0] = Leaf()
    with Tape() as tape:
        tensor = tape.watch(np.zeros(2))
    holder = [Holder, types, objects, tape, tensor, generator(Leaf()), np.random.default_rng(0)]
    assert [obj for _, obj in walk(holder)] == [holder]


def test_a_function_whose_variable_has_no_value_yet_is_passed_over():
    assert params(closure_not_yet_filled()) == []


def test_parts_come_in_the_order_in_which_they_were_assigned_outer_before_inner():
    class Net(Module):
        def __init__(self):
            self.b = Leaf()
            self.a = [Leaf(), {"z": Leaf(), "y": Leaf()}]
            self.last = Param(np.zeros(1))

    net = Net()
    paths = [path for path, obj in walk(net) if isinstance(obj, Module | Param)]
    assert paths == ["", "b", "b.w", "a.0", "a.0.w", "a.1.z", "a.1.z.w", "a.1.y", "a.1.y.w", "last"]


def test_a_shared_object_comes_once_under_its_first_path():
    leaf = Leaf()
    model = {"a": [leaf], "b": leaf}
    assert list(named_params(model)) == ["a.0.w"]
    assert [path for path, _ in modules(model)] == ["a.0"]


def test_a_shared_parameter_comes_once_and_its_other_paths_are_ties():
    one, two = Leaf(), Leaf()
    two.w = one.w
    assert list(named_params([one, two])) == ["0.w"]
    assert ties([one, two]) == {"1.w": "0.w"}
    assert ties([one, Leaf()]) == {}


def test_a_container_that_holds_itself_does_no_harm():
    leaf = Leaf()
    loop: list[Any] = [leaf]
    loop.append(loop)
    leaf.back = {"again": loop}
    assert list(named_params(loop)) == ["0.w"]


def test_depth_is_no_limit():
    nest: Any = Leaf()
    for _ in range(20_000):
        nest = [nest]
    (p,) = params(nest)
    assert p.shape == (2,)


def test_objects_made_while_walking_are_not_mistaken_for_each_other():
    class Fresh(Module):
        def fields(self):
            return [(str(i), [Leaf()]) for i in range(50)]

    assert len(named_params(Fresh())) == 50


def test_two_parameters_that_would_share_a_path_are_refused():
    with pytest.raises(StateError, match=r"share the path 'a\.w'.*Rename one"):
        named_params({"a": Leaf(), "a.w": Param(np.zeros(1))})
    with pytest.raises(StateError, match="share the path '1'"):
        named_params({1: Param(np.zeros(1)), "1": Param(np.zeros(1))})


def test_params_of_several_models_are_listed_each_once():
    one, two = Leaf(), Leaf()
    found = params(one, [two, one])
    assert [p is q for p, q in zip(found, [one.w, two.w], strict=True)] == [True, True]


def test_membership_in_params_is_identity_not_equal_values():
    one, two = Leaf(), Leaf()
    found = params(one)
    assert one.w in found
    assert two.w not in found
    assert found.index(one.w) == 0
    with pytest.raises(ValueError, match="not in the list"):
        found.index(two.w)
