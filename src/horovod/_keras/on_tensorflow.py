"""What gradients need where they are TensorFlow's; must not know any Keras optimizer.

`on_torch` has the same functions for gradients that are PyTorch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from horovod._keras.flavours import backing
from horovod._keras.settings import Settings
from horovod.common import basics
from horovod.common.ops import ReduceOp
from horovod.common.process_sets import ProcessSet
from horovod.tensorflow import collectives, reduction
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.functions import (
    allgather_object,
    broadcast_global_variables,
    broadcast_variables,
)
from horovod.tensorflow.internals import traced_function
from horovod.tensorflow.reduction import densified, is_reduced, local_gradient, mark_reduced

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

Gradient = Any  # a tensor, IndexedSlices, or None where there is none
Close = Callable[[list[Any], list[Any]], Any]


def reducer(name: str, settings: Settings) -> Callable[..., list[Gradient]]:
    """Makes the function that reduces a list of gradients of a list of variables."""
    return reduction.make_allreduce_grads_fn(
        name,
        settings.device_dense,
        settings.device_sparse,
        settings.compression,
        settings.sparse_as_dense,
        settings.op,
        settings.gradient_predivide_factor,
        settings.groups,
        settings.process_set,
    )


def largest(tensor: Any, process_set: ProcessSet) -> Any:
    """The largest value of each element over the set."""
    if not reduction.communicates(process_set):
        return tensor
    return collectives.allreduce(tensor, op=ReduceOp.Max, process_set=process_set)


def check_replicas() -> None:
    """Refuses to train inside a strategy that has several replicas in this process.

    Raises:
        ValueError: there is one.
    """
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    if replicas > 1:
        raise ValueError(
            f"a DistributedOptimizer can't train under a tf.distribute strategy with {replicas} "
            f"replicas: each would reduce by itself. Run one process a device instead, without a "
            f"strategy, as `horovodrun -np {basics.size() * replicas}` does"
        )


def check_nesting(settings: Settings) -> None:
    """Refuses a distributed optimizer around another one inside of a strategy.

    A strategy may run the one inside on another thread, where it can't see that the gradients were
    reduced. To average them again does no harm, but a sum or a window is taken twice.

    Raises:
        ValueError: there is a strategy, and it would.
    """
    again = settings.op != ReduceOp.Average or settings.backward_passes_per_step > 1
    if again and tf.distribute.has_strategy():
        raise ValueError(
            "a LossScaleOptimizer around a DistributedOptimizer with op=Sum or several passes a "
            "step can't train under a tf.distribute strategy: distribute the LossScaleOptimizer "
            "instead, or leave the strategy out"
        )


placed = tf.device


def cond(condition: Any, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    """Runs one of two functions; in a graph both are traced."""
    return tf.cond(condition, then, otherwise)


class Window:
    """Adds gradients up over several passes, and hands on the totals of the last one.

    What it keeps is variables, outside of the optimizer's own: a saved optimizer doesn't have them.
    They are made when gradients first come, outside of the function that is being traced.

    Args:
        settings: how many passes, and what is made of them.
    """

    def __init__(self, settings: Settings) -> None:
        self._passes = settings.backward_passes_per_step
        self._average = settings.average_aggregated_gradients
        self._sparse_as_dense = settings.sparse_as_dense
        self._sums: dict[int, tuple[Any, tf.Variable]] = {}  # by id: (variable, its sum)
        # Which variables have had gradients in one pass, and whether in a pass of this window.
        self._together: dict[frozenset[int], tf.Variable] = {}
        with tf.init_scope():
            self.counter = tf.Variable(0, dtype=tf.int64, trainable=False, name="passes")

    @property
    def locally_aggregated_grads(self) -> list[tf.Variable]:
        """The sums of the passes since gradients were last reduced."""
        return [total for _, total in self._sums.values()]

    def add(
        self,
        grads: Sequence[Gradient],
        variables: Sequence[Any],
        close: Close,
    ) -> None:
        """Adds the gradients of a pass; the last one of a window calls ``close`` and starts anew.

        Args:
            grads: of one pass, in the order of `variables`.
            variables: of the optimizer.
            close: gets the totals, and variables in the same order.

        Raises:
            ValueError: a gradient is IndexedSlices, and nobody said that it may become dense; or
                this is a graph of TensorFlow 1, where nothing would make the sums.
        """
        if not tf.executing_eagerly():
            graph = traced_function(tf.compat.v1.get_default_graph())
            if not graph.building_function:
                raise ValueError(
                    "backward_passes_per_step > 1 with a Keras optimizer needs eager code or a "
                    "tf.function, and this is a graph of TensorFlow 1"
                )
        for grad, variable in zip(grads, variables, strict=True):
            if grad is not None:
                self._sum_of(variable, grad).assign_add(self._dense(grad))
        pairs = zip(grads, variables, strict=True)
        present = frozenset(id(variable) for grad, variable in pairs if grad is not None)
        if present not in self._together:
            with tf.init_scope():
                self._together[present] = tf.Variable(False, trainable=False, name="together")
        self._together[present].assign(True)
        last = tf.equal(self.counter.assign_add(1), self._passes)
        tf.cond(last, lambda: self._end(present, list(variables), close), tf.no_op)

    def _dense(self, grad: Gradient) -> Any:
        if isinstance(grad, tf.IndexedSlices) and not self._sparse_as_dense:
            raise ValueError(
                "backward_passes_per_step adds gradients up in dense tensors: say "
                "sparse_as_dense=True if IndexedSlices, as of embeddings, may become that"
            )
        return densified(grad)

    def _sum_of(self, variable: Any, grad: Gradient) -> tf.Variable:
        key = id(variable)
        if key not in self._sums:
            shape = backing(variable).shape
            with tf.init_scope():
                zeros = tf.zeros(shape, grad.dtype)
                self._sums[key] = variable, tf.Variable(zeros, trainable=False, name="sum")
        return self._sums[key][1]

    def _end(self, present: frozenset[int], variables: list[Any], close: Close) -> Any:
        """Closes the window. What had gradients in an earlier pass only is part of it, too."""
        earlier = [item for item in self._together.items() if not item[0] <= present]
        self._close(present, earlier, variables, close)
        for kept in self.locally_aggregated_grads:
            kept.assign(tf.zeros_like(kept))  # not kept - kept: that would keep infinities
        for flag in self._together.values():
            flag.assign(False)
        self.counter.assign(0)
        return tf.no_op()

    def _close(
        self,
        present: frozenset[int],
        maybe: list[tuple[frozenset[int], tf.Variable]],
        variables: list[Any],
        close: Close,
    ) -> Any:
        """Closes with what had gradients in this window: no others, a zero moves them, too.

        Which that is may depend on what other traced functions did, so each case is a branch.
        """
        if maybe:
            (those, flag), *rest = maybe
            tf.cond(
                flag,
                lambda: self._close(present | those, rest, variables, close),
                lambda: self._close(present, rest, variables, close),
            )
            return tf.no_op()
        known = {id(variable) for variable in variables}
        more = [one for key, (one, _) in self._sums.items() if key in present - known]
        totals: list[Any] = []
        for variable in [*variables, *more]:
            total = None
            if id(variable) in present:
                total = tf.convert_to_tensor(self._sums[id(variable)][1])
                total = total / self._passes if self._average else total
            totals.append(total)
        close(totals, [*variables, *more])
        return tf.no_op()


# ---------------------------------------------------------------------------------------------
# Values


def allreduce(value: Any, name: str | None, op: ReduceOp, **how: Any) -> Any:
    """Reduces anything that a tensor can be made of."""
    return collectives.allreduce(tf.convert_to_tensor(value), name=name, op=op, **how)


def allgather(value: Any, name: str | None) -> Any:
    """Gathers anything that a tensor can be made of."""
    return collectives.allgather(tf.convert_to_tensor(value), name=name)


def broadcast(value: Any, root_rank: int, name: str | None) -> Any:
    """Broadcasts anything that a tensor can be made of."""
    return collectives.broadcast(tf.convert_to_tensor(value), root_rank, name=name)


def reducescatter(value: Any, name: str | None, op: ReduceOp) -> Any:
    """Reduces anything that a tensor can be made of, each rank getting its part of the rows."""
    return collectives.reducescatter(tf.convert_to_tensor(value), name=name, op=op)
