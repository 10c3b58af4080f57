"""Makes ranks start equal: variables and objects; must not know how data travels."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from horovod.common import basics, objects, ops
from horovod.common.exceptions import HorovodInternalError, MismatchError
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.tensorflow import calls, collectives, names
from horovod.tensorflow.internals import unconverted
from horovod.tensorflow.util import backing, key_of

_WHAT = "broadcast_variables"
_KINDS = f"{_WHAT}.kinds"  # the name of the call that compares what ranks have


@unconverted
def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Writes the root's values into the variables of all members.

    In eager code, first compares what each member has, in one small collective; then all broadcasts
    run at once. Blocks until every member has called it.

    Args:
        variables: of TensorFlow or Keras 3, in the same order and of equal shapes and types on all
            members. One that is there twice counts once. May be empty.
        root_rank: global rank of the member whose values count.
        process_set: who takes part.
        inplace: makes no difference: there is one copy of a value more while it travels.

    Returns:
        None in eager code; in a graph one operation that does it.

    Raises:
        tf.errors.FailedPreconditionError: on every member: they disagree about a variable; the text
            names it and both values.
        tf.errors.UnknownError: a peer is lost.
        TypeError: something else than variables was given; the others raise as if they disagreed.
        ValueError: this rank isn't in the set.
    """
    distinct = _distinct(variables, process_set)
    if not tf.executing_eagerly():
        prefix = names.call_name(_WHAT, None, calls.uid(process_set, _WHAT))
        return tf.group(
            *(
                one.assign(
                    collectives.broadcast(one, root_rank, f"{prefix}.{i}", process_set=process_set)
                )
                for i, one in enumerate(distinct)
            )
        )
    compare(distinct, process_set)
    if distinct and ops.members(process_set) > 1:
        specs = tuple(tf.TensorSpec(one.shape, one.dtype) for one in distinct)
        broadcast = _compiled(specs, root_rank, process_set, ops.enter())
        values = broadcast([one.read_value() for one in distinct])
        for one, value in zip(distinct, values, strict=True):
            one.assign(value)
    return None


def _distinct(variables: Iterable[Any], process_set: ProcessSet) -> list[Any]:
    """The variables behind those given, each once. What is none is an error on all members."""
    try:
        if isinstance(variables, (tf.Variable, tf.Tensor)):
            raise TypeError("a list of variables is needed, not one of them")
        distinct = list({key_of(one): backing(one) for one in variables}.values())
        for one in distinct:
            if not hasattr(one, "assign"):
                raise TypeError(f"{one!r} is no variable")
    except TypeError as error:
        if tf.executing_eagerly():
            name = f"{ops.ALLGATHER.name}.{_KINDS}"
            ops.reject(ops.ALLGATHER, name, calls.uid(process_set, _WHAT), error)
        raise
    return distinct


@functools.lru_cache(maxsize=64)
def _compiled(specs: tuple[Any, ...], root_rank: int, process_set: ProcessSet, run: int) -> Any:
    """One function for each kind of list, in a `run` of the engine."""

    @tf.function(input_signature=[list(specs)], autograph=False)
    def broadcast_variables(tensors: list[Any]) -> list[Any]:
        return [
            collectives.broadcast(tensor, root_rank, f"{_WHAT}.{i}", process_set=process_set)
            for i, tensor in enumerate(tensors)
        ]

    return broadcast_variables


def compare(variables: list[Any], process_set: ProcessSet) -> None:
    """Returns if all members have variables of the same shapes and types, else raises on all.

    Raises:
        tf.errors.FailedPreconditionError: they differ, another member's list is wrong, or `init()`
            was not called.
        tf.errors.UnknownError: a peer is lost.
        ValueError: this rank isn't in the set.
    """
    table = [(one.name, _kind(one)) for one in variables]
    kinds = [kind for _, kind in table]  # names may differ, and do: Keras numbers its layers
    digest = hashlib.sha256(repr(kinds).encode()).digest()
    try:
        talk = objects.Talk(_WHAT, process_set)
        members = ops.ranks(process_set)
        digests = talk.allgather(_KINDS, bytearray(digest), len(digest) * len(members))
        if digests == digest * len(members):
            return
        tables = objects.allgather_object(table, _WHAT, process_set)
    except HorovodInternalError as error:
        disagree = isinstance(error, MismatchError) or not basics.is_initialized()
        kind = tf.errors.FailedPreconditionError if disagree else tf.errors.UnknownError
        raise kind(None, None, f"HorovodBroadcast: {error}") from error
    text = f"{basics.label()} {_WHAT}: {_difference(tables, members)}"
    raise tf.errors.FailedPreconditionError(None, None, text)


def _kind(variable: Any) -> str:
    shape = variable.shape
    lengths = "of any shape" if shape.rank is None else shape.as_list()
    return f"{variable.dtype.base_dtype.name} {lengths}"


def _difference(tables: list[list[tuple[str, str]]], ranks: list[int]) -> str:
    differing: dict[int, str] = {}
    first = tables[0]
    for rank, table in zip(ranks, tables, strict=True):
        for i in range(max(len(first), len(table))):
            name, one = first[i] if i < len(first) else ("", "missing")
            other_name, other = table[i] if i < len(table) else ("", "missing")
            if one != other:
                text = (
                    f'variable {i}, "{name or other_name}", is {one} on rank {ranks[0]} but '
                    f"{other} on rank {rank}"
                )
                differing.setdefault(i, text)
    shown = list(differing.values())[:3]
    more = len(differing) - len(shown)
    return "; ".join(shown) + (f"; and {more} more differ" if more else "")


def broadcast_global_variables(root_rank: int) -> Any:
    """Makes the operation that writes the root's values into all global variables of a TF1 graph.

    Args:
        root_rank: global rank of the one whose values count.

    Returns:
        The operation. All ranks must run it.

    Raises:
        RuntimeError: in eager code, which has no such collection.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "there are no global variables in eager code: use broadcast_variables(model.variables, "
            "root_rank)"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Gives every member the root's object; the root gets back what it passed.

    Blocks until every member has called it, at once: in a graph it is no part of it.

    Args:
        obj: anything that cloudpickle can send; counts on the root only.
        root_rank: global rank of the member whose object counts.
        session: kept for compatibility; not used.
        name: matches the call with those of the other members; without one, calls match in order.
        process_set: who takes part.

    Returns:
        The root's object.

    Raises:
        HorovodInternalError: on every member: pickling or unpickling failed on one, or one is lost.
    """
    return objects.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Makes a function of one object that does as `broadcast_object` with these arguments."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Gives every member the objects of all, in the order of their ranks.

    Blocks until every member has called it, at once: in a graph it is no part of it.

    Args:
        obj: anything that cloudpickle can send.
        session: kept for compatibility; not used.
        name: matches the call with those of the other members; without one, calls match in order.
        process_set: who takes part.

    Returns:
        One object a member.

    Raises:
        HorovodInternalError: on every member: pickling or unpickling failed on one, or one is lost.
    """
    return objects.allgather_object(obj, name, process_set)
