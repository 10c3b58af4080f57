"""Small helpers around variables and lists; must not know ranks or collectives."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

Item = TypeVar("Item")
Result = TypeVar("Result")

_executing_eagerly = tf.executing_eagerly
_make_subgraph = tf.function


def _cache(function: Callable[..., Result]) -> Callable[..., Result]:
    """Remembers the results of a function of hashable arguments."""
    return functools.cache(function)


def backing(variable: Any) -> Any:
    """The TensorFlow variable behind a Keras 3 one; everything else is returned as it is."""
    if isinstance(variable, (tf.Variable, tf.Tensor)) or not is_keras(variable, "Variable"):
        return variable
    return variable.value


def is_keras(value: Any, *paths: str) -> bool:
    """Whether this is an object of a class of any Keras in use, say ``"layers.Layer"``.

    Loads none: there is no object of a Keras that isn't loaded.
    """
    for name in ("keras", "tf_keras"):
        module = sys.modules.get(name)
        for path in paths if module is not None else ():
            kind = functools.reduce(
                lambda at, step: getattr(at, step, None), path.split("."), module
            )
            if isinstance(kind, type) and isinstance(value, kind):
                return True
    return False


def key_of(variable: Any) -> Hashable:
    """What tells variables apart: the object behind them. Names repeat, in Keras 3 and elsewhere.

    Raises:
        TypeError: it is neither a variable nor a tensor.
    """
    variable = backing(variable)
    if not hasattr(variable, "ref"):
        raise TypeError(f"a variable or a tensor is needed, not {type(variable).__name__}")
    key: Hashable = variable.ref()
    return key


def vars_to_refs(variables: Any) -> Any:
    """Hashable stand-ins for variables; nested sequences become tuples.

    Args:
        variables: a variable of TensorFlow or Keras 3, a tensor, or a nested list or tuple of them.
    """
    if isinstance(variables, (list, tuple)):
        return tuple(vars_to_refs(variable) for variable in variables)
    return key_of(variables)


def refs_to_vars(refs: Any) -> Any:
    """The inverse of `vars_to_refs`; a Keras 3 variable comes back as the one behind it."""
    if isinstance(refs, (list, tuple)):
        return [refs_to_vars(ref) for ref in refs]
    return refs.deref()


def split_list(items: Sequence[Item], parts: int) -> list[list[Item]]:
    """Cuts a list into contiguous parts whose lengths differ by one at most, the longer first.

    Some are empty if there are fewer items than parts.
    """
    length, longer = divmod(len(items), parts)
    ends = [i * length + min(i, longer) for i in range(parts + 1)]
    return [list(items[start:end]) for start, end in itertools.pairwise(ends)]


def gpu_available() -> bool:
    """Whether TensorFlow sees a GPU."""
    return bool(tf.config.list_physical_devices("GPU"))


def check_num_rank_power_of_2(num_rank: int) -> bool:
    """Whether a number of ranks is a power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def trainable_weights(layers: Any) -> Iterable[Any]:
    """The trainable weights of a Keras layer or a list of them.

    Raises:
        ValueError: it is something else.
    """
    layers = layers if isinstance(layers, (list, tuple)) else [layers]
    for layer in layers:
        if not is_keras(layer, "layers.Layer"):
            raise ValueError(
                f"local_layers must be a Keras layer or a list of them; {layer!r} is none"
            )
    return [weight for layer in layers for weight in layer.trainable_weights]
