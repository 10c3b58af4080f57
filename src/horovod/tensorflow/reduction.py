"""Reduces lists of gradients for tapes and optimizers; must not know either, nor how data travels.

A gradient is a tensor, IndexedSlices, or None where there is none.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from horovod.common import basics, ops
from horovod.common.compression import bound
from horovod.common.ops import ReduceOp, reduce_op
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.tensorflow import collectives, internals, names
from horovod.tensorflow.calls import uid
from horovod.tensorflow.internals import unconverted
from horovod.tensorflow.util import key_of, split_list

Gradient = Any
Groups = Any  # None, a number of groups, or a list of lists of variables
ReduceFn = Callable[..., list[Gradient]]


@dataclass(frozen=True)
class _Options:
    """How gradients are reduced."""

    name: str
    device_dense: str
    device_sparse: str
    compression: Any
    op: ReduceOp
    predivide: float
    process_set: ProcessSet


def check_arguments(
    op: int, gradient_predivide_factor: float, num_groups: int, groups: Groups
) -> Groups:
    """Checks what tapes and optimizers are told alike; gives the groups that are meant.

    Raises:
        ValueError: a factor without averaging, groups that are none, or an `op` that is none.
    """
    if gradient_predivide_factor != 1.0 and reduce_op(op, None) is not ReduceOp.Average:
        raise ValueError("gradient_predivide_factor needs op=Average")
    if num_groups != 0:
        warnings.warn("num_groups is deprecated: use groups", DeprecationWarning, stacklevel=3)
        groups = num_groups if groups is None else groups
    number = isinstance(groups, int) and not isinstance(groups, bool) and groups > 0
    if groups is not None and not number and not isinstance(groups, (list, tuple)):
        raise ValueError(
            f"groups must be a positive number or a list of lists of variables, not {groups!r}"
        )
    return groups


def make_allreduce_grads_fn(
    name: str,
    device_dense: str,
    device_sparse: str,
    compression: Any,
    sparse_as_dense: bool,
    op: int,
    gradient_predivide_factor: float,
    groups: Groups,
    process_set: ProcessSet,
) -> ReduceFn:
    """Makes the function that reduces a list of gradients over a process set.

    ``fn(grads, vars=None, use_generic_names=False)`` gives a list in the order of ``grads``, in
    which None stays None. All members must call it with gradients of the same variables, in the
    same order; the place in the list is the name that matches them, so ``use_generic_names`` makes
    no difference. In a graph each gradient leaves as soon as it is there; in eager code they leave
    together, and the call blocks. On a rank outside of the set, and if the set has one member,
    gradients come back unreduced.

    Args:
        name: of whom this is for; part of the names of the calls.
        device_dense: where dense gradients are reduced; empty for TensorFlow's own choice.
        device_sparse: the same for IndexedSlices.
        compression: casts what travels; not applied to IndexedSlices.
        sparse_as_dense: makes IndexedSlices dense first.
        op: Average, Sum or Adasum.
        gradient_predivide_factor: f: Average divides by f before and by size / f after the sum.
        groups: None for one call a gradient, and in eager code one for all; n for n calls; or a
            list of lists of variables, each list in one call and every other variable alone.
            IndexedSlices are never in one with dense gradients.
        process_set: over whom.
    """
    op = reduce_op(op, None)
    factor = float(gradient_predivide_factor)
    options = _Options(name, device_dense, device_sparse, compression, op, factor, process_set)

    @unconverted
    def allreduce_grads(
        grads: Sequence[Gradient],
        vars: Sequence[Any] | None = None,
        use_generic_names: bool = False,
    ) -> list[Gradient]:
        grads = [densified(grad) for grad in grads] if sparse_as_dense else list(grads)
        if not communicates(process_set):
            return grads
        return _reduced(options, grads, _calls(grads, vars, groups))

    return allreduce_grads


def densified(grad: Gradient) -> Gradient:
    """The dense tensor that IndexedSlices stand for."""
    return tf.convert_to_tensor(grad) if isinstance(grad, tf.IndexedSlices) else grad


def communicates(process_set: ProcessSet) -> bool:
    """Whether this rank has anybody to reduce with.

    Raises:
        ValueError: horovod isn't initialized, or the set isn't registered.
    """
    basics.size()
    if process_set.size() is None:
        raise ValueError(f"{process_set} is not registered: see add_process_set()")
    return bool(process_set.included()) and ops.members(process_set) > 1


def allreduce_cond(tensor: Any, process_set: ProcessSet = global_process_set, **kwargs: Any) -> Any:
    """`allreduce`, but the tensor itself if this rank has nobody to reduce with."""
    if not communicates(process_set):
        return tensor
    return collectives.allreduce(tensor, process_set=process_set, **kwargs)


def local_gradient(grad: Gradient, process_set: ProcessSet) -> Gradient:
    """The gradient of a variable that only this rank has, as if it had been averaged.

    The mean of the ranks' losses depends on it through this rank's loss alone, so that is the
    gradient divided by the size of the set.
    """
    if grad is None or not communicates(process_set):
        return grad
    size = ops.members(process_set)
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(grad.values / size, grad.indices, grad.dense_shape)
    return grad / size


def reduce_global(
    reduce: ReduceFn,
    grads: Sequence[Gradient],
    variables: Sequence[Any],
    local: Collection[Hashable],
    scale_local: bool,
    process_set: ProcessSet,
) -> list[Gradient]:
    """Reduces all gradients but those of local variables, which are scaled instead or left alone.

    Args:
        reduce: from `make_allreduce_grads_fn`.
        grads: in the order of `variables`.
        variables: those of TensorFlow or Keras 3.
        local: the `key_of` of those that only this rank has. Ranks may differ in them.
        scale_local: whether `local_gradient` is applied to theirs.
        process_set: that of `reduce`.
    """
    shared = [key_of(variable) not in local for variable in variables] if local else None
    if shared is None:
        return reduce(grads, variables)
    reduced = iter(
        reduce(
            [grad for grad, is_shared in zip(grads, shared, strict=True) if is_shared],
            [one for one, is_shared in zip(variables, shared, strict=True) if is_shared],
        )
    )
    return [
        next(reduced) if is_shared else local_gradient(grad, process_set) if scale_local else grad
        for grad, is_shared in zip(grads, shared, strict=True)
    ]


# ---------------------------------------------------------------------------------------------
# What has been reduced already


def mark_reduced(grads: Sequence[Gradient]) -> None:
    """Notes on the objects themselves that they need not be reduced any more.

    For an optimizer that gets what a tape has reduced. The mark is lost with the object: where
    gradients are changed, or returned from a `tf.function`, before the optimizer gets them.
    """
    for grad in grads:
        if grad is not None:
            grad._horovod_reduced = True


def is_reduced(grad: Gradient) -> bool:
    """Whether `mark_reduced` has seen this object."""
    return getattr(grad, "_horovod_reduced", False)


# ---------------------------------------------------------------------------------------------
# Which go together, and how they go

_ALONE = "grad_"  # what the name of a call for one gradient begins with; its place follows


def _calls(
    grads: Sequence[Gradient], variables: Sequence[Any] | None, groups: Groups
) -> dict[str, list[int]]:
    """The calls by name: places in the list of gradients. Dense and sparse ones are apart.

    In a graph each gradient leaves as soon as it is there. In eager code they are all there, and a
    call waits for its end; XLA runs calls one after the other. There one call is best.
    """
    present = [i for i, grad in enumerate(grads) if grad is not None]
    sparse = [i for i in present if isinstance(grads[i], tf.IndexedSlices)]
    dense = [i for i in present if i not in set(sparse)]
    together = tf.executing_eagerly() or internals.is_compiling()
    if groups is None:
        calls = {"dense": dense} if together else _alone(dense)
    elif isinstance(groups, int):
        calls = {f"group_{i}": part for i, part in enumerate(split_list(dense, groups))}
    else:
        calls = _by_variable(dense, variables, groups)
    calls |= {"sparse": sparse} if together else _alone(sparse)
    return {name: places for name, places in calls.items() if places}


def _alone(places: list[int]) -> dict[str, list[int]]:
    return {f"{_ALONE}{place}": [place] for place in places}


def _by_variable(
    places: list[int], variables: Sequence[Any] | None, groups: Sequence[Any]
) -> dict[str, list[int]]:
    if variables is None:
        raise ValueError("groups of variables need the variables that the gradients belong to")
    numbers = {key_of(one): number for number, group in enumerate(groups) for one in group}
    calls: dict[str, list[int]] = {}
    for place in places:
        number = numbers.get(key_of(variables[place]))
        name = f"{_ALONE}{place}" if number is None else f"group_{number}"
        calls.setdefault(name, []).append(place)
    return calls


def _reduced(
    options: _Options, grads: list[Gradient], calls: dict[str, list[int]]
) -> list[Gradient]:
    """The list with the gradients of all calls reduced."""
    prefix = names.call_name(options.name, None, uid(options.process_set, options.name))
    result = list(grads)
    for name, places in calls.items():
        alone = name.startswith(_ALONE)
        reduced = _call(options, [grads[i] for i in places], f"{prefix}.{name}", alone)
        for place, grad in zip(places, reduced, strict=True):
            result[place] = grad
    return result


def _call(options: _Options, grads: list[Gradient], name: str, alone: bool) -> list[Gradient]:
    how = {
        "device_dense": options.device_dense,
        "device_sparse": options.device_sparse,
        "compression": bound(options.compression, name),
        "op": options.op,
        "name": name,
        "process_set": options.process_set,
        "ignore_name_scope": True,
    }
    if not isinstance(grads[0], tf.IndexedSlices):  # whose rows are gathered, and can't overflow
        how["prescale_factor"] = 1.0 / options.predivide
        how["postscale_factor"] = options.predivide
    if alone:
        return [collectives.allreduce(grads[0], **how)]
    return list(collectives.grouped_allreduce(grads, **how))
