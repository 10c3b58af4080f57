"""What gradients need where they are PyTorch's; must not know any Keras optimizer.

`on_tensorflow` has the same functions for gradients that are TensorFlow's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

import horovod.torch as hvd
from horovod._keras.flavours import backing
from horovod._keras.settings import Settings
from horovod.common.compression import bound
from horovod.common.ops import ReduceOp
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch.compression import Compression
from horovod.torch.functions import allgather_object

__all__ = [
    "Compression",
    "Window",
    "allgather",
    "allgather_object",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_variables",
    "check_nesting",
    "check_replicas",
    "cond",
    "densified",
    "is_reduced",
    "largest",
    "local_gradient",
    "mark_reduced",
    "placed",
    "reducer",
    "reducescatter",
]

Gradient = Any  # a tensor, or None where there is none


def reducer(name: str, settings: Settings) -> Callable[..., list[Gradient]]:
    """Makes the function that reduces a list of gradients of a list of variables."""
    factor, process_set = settings.gradient_predivide_factor, settings.process_set

    def reduce(
        grads: Sequence[Gradient],
        variables: Sequence[Any] | None = None,
        use_generic_names: bool = False,
    ) -> list[Gradient]:
        places = [place for place, grad in enumerate(grads) if grad is not None]
        result = list(grads)
        if not places or not _communicates(process_set):
            return result
        for number, call in enumerate(_calls(places, variables, settings.groups)):
            how = [bound(settings.compression, f"{name}.{place}") for place in call]
            small = [
                one.compress(_dense(result[place])) for one, place in zip(how, call, strict=True)
            ]
            reduced = hvd.grouped_allreduce(
                [tensor for tensor, _ in small],
                name=f"{name}.gradients.{number}",
                op=settings.op,
                prescale_factor=1.0 / factor,
                postscale_factor=factor,
                process_set=process_set,
            )
            for place, one, tensor, (_, context) in zip(call, how, reduced, small, strict=True):
                result[place] = one.decompress(tensor, context)
        return result

    return reduce


def _calls(places: list[int], variables: Sequence[Any] | None, groups: Any) -> list[list[int]]:
    """Which gradients go together: all of them, unless groups say otherwise."""
    if groups is None:
        return [places]
    if isinstance(groups, int):
        size = -(-len(places) // groups)
        return [places[start : start + size] for start in range(0, len(places), size)]
    if variables is None:
        raise ValueError("groups of variables need the variables that the gradients belong to")
    numbers = {id(backing(one)): number for number, group in enumerate(groups) for one in group}
    alone = itertools.count(len(groups))
    calls: dict[int, list[int]] = {}
    for place in places:
        number = numbers.get(id(backing(variables[place])))
        calls.setdefault(next(alone) if number is None else number, []).append(place)
    return [calls[number] for number in sorted(calls)]


def _communicates(process_set: ProcessSet) -> bool:
    """Whether this rank has anybody to reduce with."""
    return bool(process_set.included()) and (process_set.size() or 0) > 1


def _dense(grad: Any) -> Any:
    return grad.to_dense() if grad.layout != torch.strided else grad


def local_gradient(grad: Gradient, process_set: ProcessSet) -> Gradient:
    """The gradient of a variable that only this rank has, as if it had been averaged."""
    if grad is None or not _communicates(process_set):
        return grad
    return grad / process_set.size()


def largest(tensor: Any, process_set: ProcessSet) -> Any:
    """The largest value of each element over the set."""
    if not _communicates(process_set):
        return tensor
    return hvd.allreduce(tensor, op=ReduceOp.Max, process_set=process_set)


def densified(grad: Gradient) -> Gradient:
    """The gradient: Keras makes dense ones here."""
    return grad


def is_reduced(grad: Gradient) -> bool:
    """Whether a gradient has been reduced by `mark_reduced`'s caller."""
    return getattr(grad, "_horovod_reduced", False)


def mark_reduced(grads: Iterable[Gradient]) -> None:
    """Notes on gradients that they need not be reduced any more."""
    for grad in grads:
        if grad is not None:
            grad._horovod_reduced = True


def check_replicas() -> None:
    """Nothing to refuse: each process has one replica."""


def check_nesting(settings: Settings) -> None:
    """Nothing to refuse: there are no strategies."""


def placed(device: str) -> Any:
    """Nothing: tensors know their device."""
    return nullcontext()


def cond(condition: Any, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    """Runs one of two functions."""
    return then() if condition else otherwise()


class Window:
    """Adds gradients up over several passes, and hands on the totals of the last one.

    Args:
        settings: how many passes, and what is made of them.
    """

    def __init__(self, settings: Settings) -> None:
        self._passes = settings.backward_passes_per_step
        self._average = settings.average_aggregated_gradients
        self._sums: dict[int, tuple[Any, Any]] = {}  # by id: (variable, its sum)
        self.counter = 0

    @property
    def locally_aggregated_grads(self) -> list[Any]:
        """The sums of the passes since gradients were last reduced."""
        return [total for _, total in self._sums.values()]

    def add(
        self,
        grads: Sequence[Gradient],
        variables: Sequence[Any],
        close: Callable[[list[Any], list[Any]], Any],
    ) -> None:
        """Adds the gradients of a pass; the last one of a window calls ``close`` and starts anew.

        Args:
            grads: of one pass, in the order of `variables`.
            variables: of the optimizer.
            close: gets the totals, and variables in the same order.
        """
        for grad, variable in zip(grads, variables, strict=True):
            if grad is not None:
                _, total = self._sums.get(id(variable), (None, None))
                dense = _dense(grad)
                self._sums[id(variable)] = (
                    variable,
                    dense.clone() if total is None else total + dense,
                )
        self.counter += 1
        if self.counter < self._passes:
            return
        known = {id(variable) for variable in variables}
        everything = [*variables, *(v for key, (v, _) in self._sums.items() if key not in known)]
        totals = [self._sums.get(id(variable), (None, None))[1] for variable in everything]
        if self._average:
            totals = [total if total is None else total / self._passes for total in totals]
        close(totals, everything)
        self._sums.clear()
        self.counter = 0


# ---------------------------------------------------------------------------------------------
# Values


def allreduce(value: Any, name: str | None, op: ReduceOp, **how: Any) -> Any:
    """Reduces anything that a tensor can be made of."""
    return hvd.allreduce(torch.as_tensor(value), name=name, op=op, **how)


def allgather(value: Any, name: str | None) -> Any:
    """Gathers anything that a tensor can be made of."""
    return hvd.allgather(torch.as_tensor(value), name=name)


def broadcast(value: Any, root_rank: int, name: str | None) -> Any:
    """Broadcasts anything that a tensor can be made of."""
    return hvd.broadcast(torch.as_tensor(value), root_rank, name=name)


def reducescatter(value: Any, name: str | None, op: ReduceOp) -> Any:
    """Reduces anything that a tensor can be made of, each rank getting its part of the rows."""
    return hvd.reducescatter(torch.as_tensor(value), name=name, op=op)


def broadcast_global_variables(root_rank: int) -> Any:
    """There is no graph with global variables here.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        "broadcast_global_variables() is for graphs of TensorFlow 1: use "
        "BroadcastGlobalVariablesCallback"
    )


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Gives variables the values that they have on the root."""
    with torch.no_grad():
        for number, variable in enumerate(variables):
            tensor = backing(variable)
            hvd.broadcast_(
                tensor.data, root_rank, name=f"variable.{number}", process_set=process_set
            )
