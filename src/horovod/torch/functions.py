"""Makes ranks start equal: parameters, optimizer state, objects; must not know how data travels."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from horovod.common import basics, objects, ops
from horovod.common.exceptions import HorovodInternalError, MismatchError
from horovod.common.ops import Call
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch.ops import broadcast_async_, submit
from horovod.torch.views import TO_ENGINE


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any],
    root_rank: int,
    *,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Writes the root's tensors into those of all members.

    First compares what each member has, in one small collective. Blocks until every member has
    called it.

    Args:
        params: a ``state_dict()``, or any iterable of ``(name, tensor)`` or of tensors, for example
            ``model.named_parameters()``; also nested. Dense tensors of equal names, shapes and
            types on all members; without names they match in order.
        root_rank: global rank of the member whose values count.
        process_set: who takes part.

    Raises:
        ValueError: `params` is something else, or holds something else. The other members raise
            HorovodInternalError.
        HorovodInternalError: members disagree about a name, a shape or a type, or a peer is lost.
    """
    _broadcast_all(_agreed(params, process_set), root_rank, process_set)


_Entries = list[tuple[str | None, torch.Tensor]]


def _agreed(params: Any, process_set: ProcessSet) -> _Entries:
    """The tensors of `params` in an order that is the same on all members, or an error on all."""
    what = "broadcast_parameters"
    with Call(ops.ALLGATHER, what, process_set) as call:
        if isinstance(params, torch.Tensor):
            raise ValueError("params must be a state_dict or an iterable of tensors, not a tensor")
        entries: _Entries = list(_flat(params, None))
        entries.sort(key=lambda entry: entry[0] or "")
        table = _table(entries)
        digest = hashlib.sha256(repr(table).encode("utf-8", "backslashreplace")).digest()
        handle = submit(call, (torch.tensor([list(digest)], dtype=torch.uint8),), TO_ENGINE)
    digests = ops.synchronize(handle)
    if not bool((digests == digests[0]).all()):
        tables = objects.allgather_object(table, what, process_set)
        text = _difference(tables, ops.ranks(process_set))
        raise MismatchError(f"{basics.label()} {what}: {text}", op=what, submitted=text)
    return entries


def _flat(value: Any, name: str | None) -> Iterator[tuple[str | None, torch.Tensor]]:
    """The tensors in a value, with their names if they have any."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(item, _joined(name, key))
    elif isinstance(value, tuple) and len(value) == 2 and not isinstance(value[0], torch.Tensor):
        yield from _flat(value[1], _joined(name, value[0]))
    elif isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        for i, item in enumerate(value):
            yield from _flat(item, name and _joined(name, i))
    elif name is None:
        raise ValueError(
            f"params must be a state_dict or an iterable of tensors, and holds {value!r}"
        )
    else:
        raise ValueError(f"{name!r} in params is a {type(value).__name__}, not a tensor")


def _joined(name: str | None, key: Any) -> str:
    return str(key) if name is None else f"{name}.{key}"


def _table(entries: _Entries) -> dict[str, str]:
    """What members must have in common."""
    table = {}
    for i, (name, tensor) in enumerate(entries):
        key = f"tensor {i}" if name is None else name
        if key in table:
            raise ValueError(f"{name!r} is twice in params")
        table[key] = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    return table


def _difference(tables: list[dict[str, str]], ranks: list[int]) -> str:
    differing: dict[str, str] = {}
    for rank, table in zip(ranks, tables, strict=True):
        for name in [*tables[0], *table]:
            one, other = tables[0].get(name, "missing"), table.get(name, "missing")
            if one != other:
                text = f'"{name}" is {one} on rank {ranks[0]} but {other} on rank {rank}'
                differing.setdefault(name, text)
    shown = list(differing.values())[:3]
    more = len(differing) - len(shown)
    return "; ".join(shown) + (f"; and {more} more differ" if more else "")


def _broadcast_all(entries: _Entries, root_rank: int, process_set: ProcessSet) -> None:
    """Broadcasts in place, all at once. Goes on after an error: the others wait for every name."""
    handles = []
    first: Exception | None = None
    for name, tensor in entries:
        try:
            handles.append(broadcast_async_(tensor, root_rank, name, process_set))
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
    """Stands for any other tensor; two of the same index are one tensor."""

    index: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: str


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    *,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Makes the state and the options of every member's optimizer those of the root's.

    Changes nothing else: no step is taken, no gradient made, no parameter touched. Values keep the
    root's Python and tensor types. Members may differ in what state exists. Blocks until every
    member has called it.

    Args:
        optimizer: plain or distributed, of the same class and over the same parameter groups on
            all members.
        root_rank: global rank of the member whose values count.
        model: kept for compatibility.
        process_set: who takes part.

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
            {id(p): _Parameter(i) for i, p in enumerate(parameters)},
            tensors,
        )
    name = "optimizer_state"
    skeleton = objects.broadcast_object(skeleton, root_rank, name, process_set)
    error: Exception | None = None
    theirs, own = skeleton["layout"], _layout(optimizer)
    if theirs != own:
        error = ValueError(f"this is {own}, where the root has {theirs}")
    elif basics.rank() != root_rank:
        try:
            skeleton = _unpack(skeleton, parameters, tensors)
        except (RuntimeError, MemoryError) as no_memory:
            error = no_memory
    objects.agree(f"broadcast.{name}", "take the optimizer's state", error, process_set)

    entries: _Entries = [(f"{name}.{i}", tensor) for i, tensor in enumerate(tensors)]
    _broadcast_all(entries, root_rank, process_set)
    if basics.rank() != root_rank:
        optimizer.state.clear()
        optimizer.state.update(skeleton["state"])
        for group, options in zip(optimizer.param_groups, skeleton["options"], strict=True):
            _replace_options(group, options)


def _layout(optimizer: torch.optim.Optimizer) -> str:
    groups = [len(group["params"]) for group in optimizer.param_groups]
    return f"{type(optimizer).__name__} with parameter groups of {groups} tensors"


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


def _pack(value: Any, places: dict[int, Any], tensors: list[torch.Tensor]) -> Any:
    """`value` with its tensors replaced; those that have no place yet are added to `tensors`.

    Looks into plain dicts, lists and tuples. What lies in other objects is pickled with them, and
    so is a tensor that can't be broadcast.
    """
    if isinstance(value, torch.Tensor):
        if id(value) not in places and not _is_plain(value):
            return value
        if id(value) not in places:
            # The strides that another tensor of its layout gets: fused optimizers need them alike.
            strides = torch.empty_like(value, device="meta").stride()
            shape, device = tuple(value.shape), value.device.type
            places[id(value)] = _Tensor(len(tensors), shape, strides, value.dtype, device)
            dense = value.detach()
            tensors.append(dense if dense.stride() == strides else dense.contiguous())
        return places[id(value)]
    if type(value) is dict:
        return {key: _pack(item, places, tensors) for key, item in value.items()}
    if type(value) is list or type(value) is tuple:
        return type(value)(_pack(item, places, tensors) for item in value)
    return value


def _is_plain(tensor: torch.Tensor) -> bool:
    kinds = (torch.Tensor, torch.nn.Parameter)
    return type(tensor) in kinds and tensor.layout is torch.strided and not tensor.is_quantized


def _unpack(value: Any, parameters: list[torch.Tensor], tensors: list[torch.Tensor]) -> Any:
    """The inverse of `_pack`: with fresh tensors, also added to `tensors` in the order of index."""
    if isinstance(value, _Parameter):
        return parameters[value.index]
    if isinstance(value, _Tensor):
        if value.index == len(tensors):
            devices = (p.device for p in parameters if p.device.type == value.device)
            device = next(devices, torch.device(value.device))
            made = torch.empty_strided(value.shape, value.strides, dtype=value.dtype, device=device)
            tensors.append(made)
        return tensors[value.index]
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


def allgather_object(
    obj: Any, name: str | None = None, *, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Gives every member the objects of all, in the order of their ranks.

    Blocks until every member has called it.

    Args:
        obj: anything that cloudpickle can send.
        name: matches the call with those of the other members; without one, calls match in order.
        process_set: who takes part.

    Returns:
        One object a member.

    Raises:
        HorovodInternalError: on every member: pickling or unpickling failed on one, or one is lost.
    """
    return objects.allgather_object(obj, name, process_set)
