"""How a collective becomes an operator's call; must not know which collective the user asked for.

A call takes tensors and gives tensors: eagerly it blocks, in a traced function it makes a node that
runs as soon as its inputs are there, and in a function that XLA compiles a call of our own handler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import tensorflow as tf

from horovod.common import ops
from horovod.common.compression import NoneCompressor
from horovod.common.process_sets import ProcessSet
from horovod.tensorflow import internals, names, xla
from horovod.tensorflow.rows import ALLTOALL, Arguments, Row, Tensors, bits


def uid(process_set: ProcessSet, what: str) -> int:
    """The engine's own number of a set, whether or not this rank is in it.

    Raises:
        TypeError: this is no process set.
        ValueError: the set is not registered, or not any more.
    """
    if not isinstance(process_set, ProcessSet):
        raise TypeError(f"{what}: process_set must be a ProcessSet, not {process_set!r}")
    if process_set.uid is None:
        raise ValueError(
            f"{what}: {process_set} is not registered: see init() and add_process_set()"
        )
    return process_set.uid


class Call:
    """One call of a collective on this rank, from the moment it is known which one.

    A context manager: an exception inside it, before `run` hands over to the operator, makes the
    matching calls of the other ranks fail too.

    Args:
        row: which collective.
        name: the user's, or None.
        process_set: the engine's own number of the set.
        grouped: the tensors are agreed on and reduced together.
    """

    __slots__ = ("_full_name", "_grouped", "_handed_over", "_name", "_process_set", "_row")

    def __init__(
        self, row: Row, name: str | None, process_set: int, *, grouped: bool = False
    ) -> None:
        """Takes no number yet: who only looks at arguments in here makes no call."""
        self._row, self._name, self._full_name = row, name, ""
        self._process_set, self._grouped = process_set, grouped
        self._handed_over = False

    def _called(self) -> str:
        """The full name, with the next number if it needs one."""
        if not self._full_name:
            prefix = f"grouped_{self._row.op.name}" if self._grouped else self._row.op.name
            self._full_name = names.call_name(prefix, self._name, self._process_set)
        return self._full_name

    def __enter__(self) -> Call:
        """Starts the part whose failure the other ranks are told."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Tells the other ranks if the call failed here."""
        if error is not None and not self._handed_over:
            ops.reject(self._row.op, self._called(), self._process_set, error)

    def run(
        self,
        values: Sequence[Any],
        arguments: Arguments | None = None,
        compression: Any = NoneCompressor,
        check: Callable[[Tensors], None] | None = None,
    ) -> list[tf.Tensor]:
        """Makes the call.

        Args:
            values: what can be converted to tensors; one, unless the call is grouped.
            arguments: what else the collective needs.
            compression: what the tensors become for the way.
            check: raises ValueError if the tensors can't be right.

        Returns:
            The outputs, in the order of `values`; after alltoall's the received splits.

        Raises:
            ValueError: a value can't be a tensor, or `check` says so.
            tf.errors.UnimplementedError: XLA can't do it.
            tf.errors.OpError: see `horovod.tensorflow`.
        """
        name = self._called()
        pairs = [compression.compress(tf.convert_to_tensor(value)) for value in values]
        tensors = [_supported(tensor) for tensor, _ in pairs]
        if check is not None:
            check(tensors)
        outputs = self._outputs(tensors, name, arguments or Arguments())
        for i, (_, context) in enumerate(pairs):
            outputs[i] = compression.decompress(outputs[i], context)
        return outputs

    def _outputs(self, tensors: Tensors, name: str, arguments: Arguments) -> list[tf.Tensor]:
        route = xla.call if internals.is_compiling() else _call
        try:
            outputs = route(self._row, tensors, name, self._process_set, self._grouped, arguments)
        except tf.errors.UnimplementedError:  # the function can't be traced
            raise
        except tf.errors.OpError:
            self._handed_over = True  # the engine's judgement: it told the others
            raise
        self._handed_over = True
        return outputs


@internals.unconverted
def call(
    row: Row,
    values: Sequence[Any],
    name: str | None,
    process_set: int,
    *,
    grouped: bool = False,
    arguments: Arguments | None = None,
) -> list[tf.Tensor]:
    """Makes a call whose arguments are no user's; see `Call`."""
    with Call(row, name, process_set, grouped=grouped) as made:
        return made.run(values, arguments)


_DTYPES = frozenset(tf.as_dtype(dtype.name) for dtype in ops.DType)


def _supported(tensor: tf.Tensor) -> tf.Tensor:
    if tensor.dtype not in _DTYPES:
        raise ValueError(f"data type {tensor.dtype.name} is not supported")
    return tensor


def _call(
    row: Row, tensors: Tensors, name: str, process_set: int, grouped: bool, arguments: Arguments
) -> list[tf.Tensor]:
    attributes = {
        "tensor_name": name,
        "site": names.site(),
        "process_set_id": process_set,
        "reduce_op": int(arguments.reduce_op),
        "prescale_bits": bits(arguments.prescale),
        "postscale_bits": bits(arguments.postscale),
        "root_rank": ops.root_number(arguments.root),
        "wait": tf.executing_eagerly(),
    }

    def make() -> list[tf.Tensor]:
        if grouped:
            assert row.grouped is not None
            return list(row.grouped(list(tensors), **attributes))
        if row is ALLTOALL:
            return list(row.single(tensors[0], arguments.splits, **attributes))
        return [row.single(tensors[0], **attributes)]

    if tf.executing_eagerly():
        return make()
    key = f"{process_set}/{name}"
    with tf.control_dependencies([*names.made_before(key), *names.made_before(names.JOIN)]):
        outputs = make()
    names.made(key, outputs[0].op)
    internals.run_independently(outputs[0].op)
    return outputs
