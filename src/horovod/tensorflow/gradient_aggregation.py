"""Adds up the gradients of several passes before they are reduced; must not know how they are.

A window is N passes. Each pass adds to accumulators; the last one reduces what they hold, and
clears them by writing zeros, so that an infinity does not outlive its window.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar

import tensorflow as tf

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.tensorflow.internals import unconverted
from horovod.tensorflow.reduction import ReduceFn, densified, reduce_global
from horovod.tensorflow.util import key_of


class Aggregation:
    """What both helpers have in common: all but how a variable is made.

    Args:
        backward_passes_per_step: N.
        allreduce_func: from `make_allreduce_grads_fn`.
        sparse_as_dense: makes IndexedSlices dense; without it they are refused.
        average_aggregated_gradients: divides the sum of the passes by N.
        process_set: that of `allreduce_func`.
        scale_local_gradients: divides gradients of local variables by the size of the set.

    Raises:
        ValueError: N isn't positive.
    """

    def __init__(
        self,
        backward_passes_per_step: int,
        allreduce_func: ReduceFn,
        sparse_as_dense: bool,
        average_aggregated_gradients: bool,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
    ) -> None:
        if backward_passes_per_step <= 0:
            raise ValueError(
                f"backward_passes_per_step must be positive, not {backward_passes_per_step}"
            )
        self.backward_passes_per_step = backward_passes_per_step
        self.sparse_as_dense = sparse_as_dense
        self.average_aggregated_gradients = average_aggregated_gradients
        self.process_set = process_set
        self.scale_local_gradients = scale_local_gradients
        self.counter: Any = None
        """The passes of this window so far, once there was one: an integer variable."""
        self._allreduce_grads = allreduce_func
        self._local_vars: set[Hashable] = set()
        self._sums: dict[Hashable, Any] = {}
        self._seen: set[Hashable] = set()  # variables that have had a gradient

    @property
    def locally_aggregated_grads(self) -> list[Any]:
        """The accumulators, one a variable."""
        return list(self._sums.values())

    def register_local_var(self, var: Any) -> None:
        """Says that a variable is this rank's own: its gradient is added up, but not reduced."""
        self._local_vars.add(key_of(var))

    def _make_variable(self, value: Any, name: str) -> Any:
        raise NotImplementedError

    def _advance(self, global_step: Any) -> Any:
        """What a pass does that takes no step."""
        return None

    @unconverted
    def compute_gradients(self, grads: Sequence[Any], vars: Sequence[Any]) -> list[Any]:
        """Adds one pass. The window's last one must be made by all members, and reduces.

        Args:
            grads: this pass's gradients, None where there is none.
            vars: what they belong to.

        Returns:
            For the last pass the reduced gradients; for the others something of the same shapes.
            None for a variable that never had a gradient.

        Raises:
            ValueError: there are IndexedSlices, and `sparse_as_dense` isn't set.
        """
        keys = [key_of(var) for var in vars]
        dense = [self._checked(grad) for grad in grads]
        self._make_accumulators(keys, dense, vars)
        present = [(key, grad) for key, grad in zip(keys, dense, strict=True) if grad is not None]
        self._seen.update(key for key, _ in present)
        sums = {key: self._sums[key] for key in keys if key in self._seen}
        added = [sums[key].assign_add(grad, read_value=False) for key, grad in present]
        with tf.control_dependencies(added):
            passes = tf.identity(self.counter.assign_add(1))
        totals = tf.cond(
            passes >= self.backward_passes_per_step,
            lambda: self._finish(sums, dict(zip(keys, vars, strict=True))),
            lambda: [total.read_value() for total in sums.values()],
        )
        by_key = dict(zip(sums, totals, strict=True))
        return [by_key.get(key) for key in keys]

    def _checked(self, grad: Any) -> Any:
        if isinstance(grad, tf.IndexedSlices) and not self.sparse_as_dense:
            raise ValueError(
                "IndexedSlices can't be added up over passes: set sparse_as_dense=True, or "
                "backward_passes_per_step=1"
            )
        return densified(grad)

    def _make_accumulators(
        self, keys: Sequence[Hashable], grads: Sequence[Any], variables: Sequence[Any]
    ) -> None:
        """Makes all of them at once: a `tf.function` may make variables in its first call only."""
        with tf.init_scope():
            if self.counter is None:
                self.counter = self._make_variable(tf.zeros((), tf.int32), "counter")
            for key, grad, variable in zip(keys, grads, variables, strict=True):
                if key not in self._sums:
                    like = variable if grad is None else grad
                    shape = variable.shape if variable.shape.is_fully_defined() else like.shape
                    zeros = tf.zeros(shape, like.dtype)
                    self._sums[key] = self._make_variable(zeros, f"sum_{len(self._sums)}")

    def _finish(self, sums: dict[Hashable, Any], variables: dict[Hashable, Any]) -> list[Any]:
        totals = [total.read_value() for total in sums.values()]
        with tf.control_dependencies(totals):
            cleared = [
                one.assign(tf.zeros_like(total), read_value=False)
                for one, total in zip(sums.values(), totals, strict=True)
            ]
            cleared.append(self.counter.assign(0, read_value=False))
        if self.average_aggregated_gradients:
            totals = [total / self.backward_passes_per_step for total in totals]
        reduced = reduce_global(
            self._allreduce_grads,
            totals,
            [variables[key] for key in sums],
            self._local_vars,
            self.scale_local_gradients,
            self.process_set,
        )
        with tf.control_dependencies(cleared):  # nothing else in a branch holds on to them
            return [tf.identity(grad) for grad in reduced]

    @unconverted
    def apply_gradients(
        self, apply_grads_closure: Callable[[], Any], optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Takes the optimizer's step if the pass before was the last of a window.

        Args:
            apply_grads_closure: takes the step.
            optimizer: whose step it is.
            args: what the closure gives the optimizer: a list of (gradient, variable), and for a
                v1 optimizer the global step.
            kwargs: the same by name.

        Returns:
            In graphs an operation; in eager code what the closure gives, or None.
        """
        pairs = args[0] if args else kwargs.get("grads_and_vars", ())
        global_step = args[1] if len(args) > 1 else kwargs.get("global_step")
        with tf.control_dependencies([grad for grad, _ in pairs if grad is not None]):
            complete = tf.equal(self.counter.read_value(), 0)
        if tf.executing_eagerly():
            return apply_grads_closure() if complete else self._advance(global_step)

        def run(closure: Callable[[], Any]) -> Callable[[], Any]:
            def branch() -> Any:
                done = closure()
                known = isinstance(done, (tf.Tensor, tf.Operation))
                with tf.control_dependencies([done] if known else []):
                    return tf.constant(True)

            return branch

        advance = run(lambda: self._advance(global_step))
        return tf.group(tf.cond(complete, run(apply_grads_closure), advance))


class LocalGradientAggregationHelper(Aggregation):
    """Adds up gradients in graphs of TF1.

    What it keeps are local variables: run ``tf.compat.v1.local_variables_initializer()``.

    Args:
        backward_passes_per_step: see `Aggregation`, as for all that isn't named here.
        allreduce_func: see there.
        sparse_as_dense: see there.
        average_aggregated_gradients: see there.
        rank: part of the names of the variables.
        optimizer_type: a global step advances with each pass of a legacy optimizer, as users of
            these expect; the iterations of a Keras optimizer with each of its steps.
        process_set: see there.
        scale_local_gradients: see there.
        name: part of the names of the variables.
    """

    _OPTIMIZER_TYPE_KERAS: ClassVar[str] = "optimizer_type_keras"
    _OPTIMIZER_TYPE_LEGACY: ClassVar[str] = "optimizer_type_legacy"

    def __init__(
        self,
        backward_passes_per_step: int,
        allreduce_func: ReduceFn,
        sparse_as_dense: bool,
        average_aggregated_gradients: bool,
        rank: int,
        optimizer_type: str,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
        name: str = "",
    ) -> None:
        super().__init__(
            backward_passes_per_step,
            allreduce_func,
            sparse_as_dense,
            average_aggregated_gradients,
            process_set,
            scale_local_gradients,
        )
        if optimizer_type not in (self._OPTIMIZER_TYPE_KERAS, self._OPTIMIZER_TYPE_LEGACY):
            raise ValueError(f"optimizer_type {optimizer_type!r} is none of the class's constants")
        self._legacy = optimizer_type == self._OPTIMIZER_TYPE_LEGACY
        self._scope = f"aggregation_variables_{name}{rank}"

    def _make_variable(self, value: Any, name: str) -> Any:
        return tf.compat.v1.Variable(
            value,
            trainable=False,
            collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES],
            name=f"{self._scope}/{name}",
            use_resource=True,
        )

    def _advance(self, global_step: Any) -> Any:
        if not self._legacy or global_step is None:
            return None
        return tf.compat.v1.assign_add(global_step, 1).op
