"""What a call is called, and where the user made it; must not know what it does.

A name must be the same on every rank, whatever else the ranks have traced. In a traced function a
call without a name of the user's gets the function's name and its own number among the trace's
calls of one process set: those of a set are not traced by ranks outside of it.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

from horovod.common import sites
from horovod.tensorflow import internals

_packages = Path(tf.__file__).parent.parent
sites.pass_over(
    *(f"{_packages / name}{os.sep}" for name in ("tensorflow", "keras", "tf_keras")),
    "__autograph_generated_file",
)

# By traced function, the numbers of each process set.
_numbers: weakref.WeakKeyDictionary[Any, dict[int, Iterator[int]]] = weakref.WeakKeyDictionary()
_EAGER = "eager"


def call_name(prefix: str, name: str | None, process_set: int) -> str:
    """The name of a call, ``<prefix>.<name>``, counted in its traced function if `name` is None.

    Eager calls without a name all have the same: the engine knows it, and they come one by one.

    Args:
        prefix: of calls of one kind.
        name: the user's, or None.
        process_set: the engine's own number of the set.
    """
    if name is None:
        name = _EAGER if tf.executing_eagerly() else _next_name(process_set)
    return f"{prefix}.{name}"


def _next_name(process_set: int) -> str:
    graph = internals.traced_function(tf.compat.v1.get_default_graph())
    numbers = _numbers.setdefault(graph, {}).setdefault(process_set, itertools.count())
    return f"{internals.function_name(graph)}.{next(numbers)}"


# By graph the name of the operation that made the last call of a name: TensorFlow has no order for
# the two, and without one each rank would take its own.
_made: weakref.WeakKeyDictionary[Any, dict[str, str]] = weakref.WeakKeyDictionary()


_taking_turns: weakref.WeakSet[Any] = weakref.WeakSet()  # graphs of functions


def made(key: str, operation: Any) -> None:
    """Remembers that an operation makes a call of this name and process set."""
    function = internals.traced_function(operation.graph)
    if function not in _taking_turns:
        # Functions of one name have calls of the same names, so those of two never overlap.
        _taking_turns.add(function)
        internals.take_turns(function)
    _made.setdefault(operation.graph, {})[key] = operation.name


def made_before(key: str) -> list[Any]:
    """The operation that a further call of this name has to come after, if there is one."""
    here = tf.compat.v1.get_default_graph()
    for graph in internals.enclosing_graphs(here):
        if (name := _made.get(graph, {}).get(key)) is not None:
            return [graph.get_operation_by_name(name)]
    return []


def all_made() -> list[Any]:
    """The operations that a join has to come after, or this rank had joined before its own calls.

    None in graphs of TensorFlow 1, whose operations run if they are asked for.
    """
    here = tf.compat.v1.get_default_graph()
    return [
        graph.get_operation_by_name(name)
        for graph in internals.enclosing_graphs(here)
        if graph.building_function
        for name in _made.get(graph, {}).values()
    ]


JOIN = "join"  # the key of a join's own operation, which all later calls come after


def _remember(text: str) -> int:
    _texts.append(text)
    return len(_texts) - 1


_texts = [""]
_sites = sites.Sites(_remember)


def site() -> str:
    """The line of the user's that makes the call, like ``train.py:12``."""
    if tf.executing_eagerly():
        return _texts[_sites.here()]
    for frame in reversed(internals.stack()):
        if sites.is_users(frame.filename):
            return sites.text(frame.filename, frame.lineno)
    return ""
