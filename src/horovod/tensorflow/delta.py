"""A `tf.compat.v1` optimizer whose steps are combined with Adasum; must not know how data travels.

Adasum combines updates rather than gradients: each rank takes its own steps, and the differences
they made to the variables are combined (Maleki et al., arXiv:2006.02924, section 3.3).
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horovod.common.compression import bound
from horovod.common.ops import ReduceOp
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.tensorflow import collectives, names
from horovod.tensorflow.forwarding import ForwardingOptimizer
from horovod.tensorflow.reduction import communicates

_START = "delta_start"  # the slot that holds a variable as it was when the window began


class DeltaOptimizer(ForwardingOptimizer):
    """Steps on this rank's gradients; after N steps, combines what they changed with all ranks'.

    Args:
        optimizer: the wrapped one.
        name: of this one.
        use_locking: as for every v1 optimizer.
        device_dense: where differences are combined.
        compression: what travels.
        backward_passes_per_step: N.
        process_set: the global one.

    Raises:
        NotImplementedError: it is another process set.
        ValueError: N isn't positive.
    """

    def __init__(
        self,
        optimizer: Any,
        name: str,
        use_locking: bool,
        device_dense: str,
        compression: Any,
        backward_passes_per_step: int,
        process_set: ProcessSet,
    ) -> None:
        super().__init__(optimizer, name, use_locking)
        if process_set is not global_process_set:
            raise NotImplementedError("op=Adasum works on the global process set only")
        if backward_passes_per_step <= 0:
            raise ValueError(
                f"backward_passes_per_step must be positive, not {backward_passes_per_step}"
            )
        self._device_dense = device_dense
        self._compression = compression
        self._passes = backward_passes_per_step
        self._counter: Any = None
        self._communicates = communicates(process_set)

    def get_slot(self, var: Any, name: str) -> Any:
        """As the wrapped optimizer, which doesn't have the ``delta_start`` of this one."""
        return (
            super(ForwardingOptimizer, self).get_slot(var, name)
            if name == _START
            else (self._optimizer.get_slot(var, name))
        )

    def apply_gradients(
        self, grads_and_vars: Any, global_step: Any = None, name: str | None = None
    ) -> Any:
        """Takes the wrapped optimizer's step; the N-th of a window is combined with all ranks'.

        All ranks must call it.
        """
        pairs = list(grads_and_vars)
        if not self._communicates:
            return self._optimizer.apply_gradients(pairs, global_step, name)
        changed = [(grad, variable) for grad, variable in pairs if grad is not None]
        variables = [variable for _, variable in changed]
        with tf.init_scope():
            starts = [self._zeros_slot(variable, _START, self._name) for variable in variables]
            if self._counter is None:
                self._counter = tf.compat.v1.Variable(
                    0, trainable=False, name=f"{self._name}/passes", use_resource=True
                )
        # A gradient reads the variable before any of this changes it.
        with tf.control_dependencies([_tensor(grad) for grad, _ in changed]):
            begins = tf.equal(self._counter.read_value(), 0)
            begun = tf.cond(begins, lambda: _assigned(starts, _values(variables)), _nothing)
        with tf.control_dependencies([begun]):
            step = self._optimizer.apply_gradients(pairs, global_step, name)
        with tf.control_dependencies([] if step is None else [step]):
            passes = tf.identity(self._counter.assign_add(1))
        combined = tf.cond(
            passes >= self._passes, lambda: self._combine(variables, starts), _nothing
        )
        return step if tf.executing_eagerly() else tf.group(combined)

    def _combine(self, variables: list[Any], starts: list[Any]) -> Any:
        """Makes each variable what it was when the window began, plus Adasum of all changes."""
        prefix = names.call_name(self._name, None, 0)
        before, after = _values(starts), _values(variables)
        values = []
        for i, (start, now) in enumerate(zip(before, after, strict=True)):
            name = f"{prefix}.delta_{i}"
            delta = collectives.allreduce(
                now - start,
                device_dense=self._device_dense,
                compression=bound(self._compression, name),
                op=ReduceOp.Adasum,
                name=name,
                ignore_name_scope=True,
            )
            values.append(start + delta)
        return _assigned([*variables, self._counter], [*values, 0])


def _tensor(grad: Any) -> Any:
    return grad.values if isinstance(grad, tf.IndexedSlices) else grad


def _values(variables: list[Any]) -> list[Any]:
    return [tf.identity(variable.read_value()) for variable in variables]


def _assigned(variables: list[Any], values: list[Any]) -> Any:
    """Assigns, and gives a tensor that is there once that is done."""
    done = [
        variable.assign(value, read_value=False)
        for variable, value in zip(variables, values, strict=True)
    ]
    with tf.control_dependencies(done):
        return _nothing()


def _nothing() -> Any:
    return tf.constant(True)
