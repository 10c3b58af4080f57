"""Makes ranks start equal: parameters, optimizer state, objects; must not know how data travels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from horovod.common import basics, objects, ops
from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch.ops import broadcast_async_


def broadcast_parameters(
    params: Mapping[str, torch.Tensor] | Iterable[Any], root_rank: int
) -> None:
    """Writes the root's tensors into those of all ranks.

    Blocks until every rank has called it with the same names.

    Args:
        params: a ``state_dict()``, or any iterable of ``(name, tensor)`` or of tensors, for example
            ``model.named_parameters()``. CPU tensors of equal shape and type on all ranks.
        root_rank: the rank whose values count.

    Raises:
        ValueError: `params` is something else, or holds something else.
        HorovodInternalError: ranks disagree about a tensor, or a peer is lost.
    """
    _broadcast_all(_named(params), root_rank)


def _named(params: Mapping[str, torch.Tensor] | Iterable[Any]) -> list[tuple[str | None, Any]]:
    if isinstance(params, Mapping):
        entries: list[Any] = sorted(params.items(), key=lambda item: str(item[0]))
    elif isinstance(params, Iterable) and not isinstance(params, (str, bytes, torch.Tensor)):
        entries = [(None, item) if isinstance(item, torch.Tensor) else item for item in params]
    else:
        raise ValueError(
            f"params must be a state_dict or an iterable of tensors, not {type(params).__name__}"
        )
    for entry in entries:
        if not (isinstance(entry, tuple) and len(entry) == 2):
            raise ValueError(f"params holds {entry!r}, which is no tensor and no (name, tensor)")
        if not isinstance(entry[1], torch.Tensor):
            raise ValueError(f"{entry[0]!r} in params is a {type(entry[1]).__name__}, not a tensor")
    return entries


def _broadcast_all(entries: Iterable[tuple[str | None, torch.Tensor]], root_rank: int) -> None:
    """Broadcasts in place, all at once. Goes on after an error: the others wait for every name."""
    handles = []
    first: Exception | None = None
    for name, tensor in entries:
        try:
            handles.append(broadcast_async_(tensor, root_rank, name))
        except (ValueError, HorovodInternalError) as error:
            first = first or error
    try:
        ops.synchronize_all(handles)
    except (ValueError, HorovodInternalError) as error:
        first = first or error
    if first is not None:
        raise first


# ---------------------------------------------------------------------------------------------
# Optimizer state: the root sends a skeleton, in which places stand for tensors, then the tensors.


@dataclass(frozen=True)
class _Parameter:
    """Stands for one of the optimizer's own parameters."""

    index: int


@dataclass(frozen=True)
class _Tensor:
    """Stands for any other tensor."""

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Makes the state and the options of every rank's optimizer those of the root's.

    Changes nothing else: no step is taken, no gradient made, no parameter touched. Values keep the
    root's Python and tensor types. Ranks may differ in what state exists. Blocks until every rank
    has called it.

    Args:
        optimizer: plain or distributed, over the same parameter groups on all ranks.
        root_rank: the rank whose values count.
        model: kept for compatibility.

    Raises:
        HorovodInternalError: on every rank: the groups differ, a value can't be pickled, a state
            tensor can't be sent, or a peer is lost.
    """
    if basics.size() == 1:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    tensors: list[torch.Tensor] = []
    skeleton: Any = None
    if basics.rank() == root_rank:
        skeleton = _pack(
            {
                "layout": _layout(optimizer),
                "state": [(key, value) for key, value in optimizer.state.items()],
                "options": [_options(group) for group in optimizer.param_groups],
            },
            {id(p): i for i, p in enumerate(parameters)},
            tensors,
        )
    name = "optimizer_state"
    skeleton = objects.broadcast_object(skeleton, root_rank, name, global_process_set)
    error: Exception | None = None
    theirs, own = skeleton["layout"], _layout(optimizer)
    if theirs != own:
        error = ValueError(f"parameter groups of {own} tensors, where the root has {theirs}")
    elif basics.rank() != root_rank:
        try:
            skeleton = _unpack(skeleton, parameters, tensors)
        except (RuntimeError, MemoryError) as no_memory:
            error = no_memory
    objects.agree(f"broadcast.{name}", "take the state", error, global_process_set)

    _broadcast_all([(f"{name}.{i}", tensor) for i, tensor in enumerate(tensors)], root_rank)
    if basics.rank() != root_rank:
        optimizer.state.clear()
        optimizer.state.update(skeleton["state"])
        for group, options in zip(optimizer.param_groups, skeleton["options"], strict=True):
            _replace_options(group, options)


def _layout(optimizer: torch.optim.Optimizer) -> list[int]:
    return [len(group["params"]) for group in optimizer.param_groups]


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _replace_options(group: dict[str, Any], options: dict[str, Any]) -> None:
    for key in _options(group).keys() - options.keys():
        del group[key]
    for key, value in options.items():
        old = group.get(key)
        if (
            isinstance(old, torch.Tensor)
            and isinstance(value, torch.Tensor)
            and (old.shape, old.dtype) == (value.shape, value.dtype)
        ):
            with torch.no_grad():
                old.copy_(value)  # schedulers and compiled steps hold on to a learning-rate tensor
        else:
            group[key] = value


def _pack(value: Any, parameters: dict[int, int], tensors: list[torch.Tensor]) -> Any:
    """`value` with its tensors replaced; those that are no parameters are added to `tensors`.

    Looks into plain dicts, lists and tuples; what lies in other objects is pickled with them.
    """
    if isinstance(value, torch.Tensor):
        if id(value) in parameters:
            return _Parameter(parameters[id(value)])
        tensors.append(value.detach().contiguous())
        return _Tensor(len(tensors) - 1, tuple(value.shape), value.dtype)
    if type(value) is dict:
        return {key: _pack(item, parameters, tensors) for key, item in value.items()}
    if type(value) is list or type(value) is tuple:
        return type(value)(_pack(item, parameters, tensors) for item in value)
    return value


def _unpack(value: Any, parameters: list[torch.Tensor], tensors: list[torch.Tensor]) -> Any:
    """The inverse of `_pack`: with fresh tensors, also added to `tensors` in the order of index."""
    if isinstance(value, _Parameter):
        return parameters[value.index]
    if isinstance(value, _Tensor):
        tensors.append(torch.empty(value.shape, dtype=value.dtype, device="cpu"))
        return tensors[-1]
    if type(value) is dict:
        return {key: _unpack(item, parameters, tensors) for key, item in value.items()}
    if type(value) is list or type(value) is tuple:
        return type(value)(_unpack(item, parameters, tensors) for item in value)
    return value


# ---------------------------------------------------------------------------------------------
# Objects


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Gives every member the root's object; the root gets back what it passed.

    Blocks until every member has called it.

    Args:
        obj: anything that cloudpickle can send; counts on the root only.
        root_rank: global rank of the member whose object counts.
        name: matches the call with those of the other members; without one, calls match in order.
        process_set: who takes part.

    Returns:
        The root's object.

    Raises:
        HorovodInternalError: on every member: pickling or unpickling failed on one, or one is lost.
    """
    return objects.broadcast_object(obj, root_rank, name, process_set)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Gives every rank the objects of all, in the order of their ranks.

    Blocks until every rank has called it.

    Args:
        obj: anything that cloudpickle can send.
        name: matches the call with those of the other ranks; without one, calls match in order.

    Returns:
        One object a rank.

    Raises:
        HorovodInternalError: on every rank: pickling or unpickling failed on one, or one is lost.
    """
    return objects.allgather_object(obj, name, global_process_set)
