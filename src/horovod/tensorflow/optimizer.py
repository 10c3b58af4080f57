"""`DistributedOptimizer` for `tf.compat.v1`; of Keras it only knows who wraps its optimizers."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import tensorflow as tf

from horovod.common import basics
from horovod.common.ops import ReduceOp, reduce_op
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.delta import DeltaOptimizer
from horovod.tensorflow.forwarding import ForwardingOptimizer
from horovod.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from horovod.tensorflow.reduction import (
    ReduceFn,
    check_arguments,
    make_allreduce_grads_fn,
    reduce_global,
)
from horovod.tensorflow.util import is_keras, key_of


class _DistributedOptimizer(ForwardingOptimizer):
    """Computes the wrapped optimizer's gradients, reduced, and applies what it is given."""

    def __init__(
        self,
        optimizer: Any,
        name: str,
        use_locking: bool,
        reduce: ReduceFn,
        process_set: ProcessSet,
        scale_local_gradients: bool,
        agg_helper: LocalGradientAggregationHelper | None,
    ) -> None:
        super().__init__(optimizer, name, use_locking)
        self._allreduce_grads = reduce
        self._agg_helper = agg_helper
        self._local_vars: set[Hashable] = set()
        self.process_set = process_set
        self.scale_local_gradients = scale_local_gradients

    def register_local_var(self, var: Any) -> None:
        """Says that a variable is this rank's own: its gradient stays local."""
        self._local_vars.add(key_of(var))
        if self._agg_helper is not None:
            self._agg_helper.register_local_var(var)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Computes gradients as the wrapped optimizer does, then reduces them.

        All members of the process set must call it, for the same variables in the same order.

        Returns:
            Pairs of (gradient, variable).

        Raises:
            ValueError: aggregation over passes was asked for, and this is no graph.
        """
        if self._agg_helper is not None and tf.executing_eagerly():
            raise ValueError("backward_passes_per_step > 1 needs a graph: see tf.compat.v1.Graph")
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        grads, variables = [grad for grad, _ in pairs], [variable for _, variable in pairs]
        if self._agg_helper is not None:
            grads = self._agg_helper.compute_gradients(grads, variables)
        else:
            grads = reduce_global(
                self._allreduce_grads,
                grads,
                variables,
                self._local_vars,
                self.scale_local_gradients,
                self.process_set,
            )
        return list(zip(grads, variables, strict=True))

    def apply_gradients(
        self, grads_and_vars: Any, global_step: Any = None, name: str | None = None
    ) -> Any:
        """Applies gradients as the wrapped optimizer does; with aggregation, once in a window."""
        pairs = list(grads_and_vars)
        if self._agg_helper is None:
            return self._optimizer.apply_gradients(pairs, global_step, name)
        return self._agg_helper.apply_gradients(
            lambda: self._optimizer.apply_gradients(pairs, global_step, name),
            self._optimizer,
            pairs,
            global_step,
        )


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = ReduceOp.Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Makes an optimizer that steps with the gradients of all ranks together.

    An optimizer of `tf.compat.v1.train` is wrapped in another one, whose `compute_gradients`
    reduces. A Keras optimizer goes to `horovod.tensorflow.keras.DistributedOptimizer`, with all
    arguments. Either way gradients from a `DistributedGradientTape` are reduced already.

    Args:
        optimizer: of `tf.compat.v1.train`, of Keras 3 or of tf-keras.
        name: of the optimizer; ``Distributed<ClassName>`` without one.
        use_locking: for v1 optimizers; Keras has no such thing.
        device_dense: where dense gradients are reduced; empty for TensorFlow's own choice.
        device_sparse: the same for IndexedSlices.
        compression: what travels, see `Compression`; not applied to IndexedSlices.
        sparse_as_dense: makes IndexedSlices dense before they are reduced.
        backward_passes_per_step: N passes are added up on each rank, then reduced, then applied.
            With a v1 optimizer, the passes between leave everything alone but `global_step`, which
            counts passes.
        op: Average or Sum; Adasum, with v1 optimizers, combines the steps that ranks took.
        gradient_predivide_factor: f: Average divides by f before and by size / f after the sum.
        average_aggregated_gradients: divides the sum over passes by N.
        num_groups: deprecated: the same as a number for `groups`.
        groups: None for what is fastest; n for n calls; or a list of lists of variables, each
            list in one call and every other variable alone.
        process_set: over whom. A rank outside of it trains alone.
        scale_local_gradients: divides gradients of local variables by the size of the set.

    Raises:
        ValueError: an argument is none of these, or horovod isn't initialized.
        NotImplementedError: Adasum over a process set.
    """
    groups = check_arguments(op, gradient_predivide_factor, num_groups, groups)
    op = reduce_op(op, None)
    if op is ReduceOp.Adasum and average_aggregated_gradients:
        raise ValueError("op=Adasum combines steps, so average_aggregated_gradients means nothing")
    if is_keras(optimizer, "optimizers.Optimizer", "optimizers.legacy.Optimizer"):
        if op is ReduceOp.Adasum:
            raise ValueError("op=Adasum isn't supported with Keras optimizers")
        from horovod.tensorflow.keras import DistributedOptimizer as wrapped

        return wrapped(
            optimizer,
            name=name,
            device_dense=device_dense,
            device_sparse=device_sparse,
            compression=compression,
            sparse_as_dense=sparse_as_dense,
            gradient_predivide_factor=gradient_predivide_factor,
            op=op,
            backward_passes_per_step=backward_passes_per_step,
            average_aggregated_gradients=average_aggregated_gradients,
            groups=groups,
            process_set=process_set,
            scale_local_gradients=scale_local_gradients,
        )
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        raise ValueError(
            f"an optimizer of tf.compat.v1.train or of Keras is needed, not "
            f"{type(optimizer).__module__}.{type(optimizer).__name__}"
        )
    if backward_passes_per_step > 1 and tf.executing_eagerly():
        raise ValueError("backward_passes_per_step > 1 needs a graph: see tf.compat.v1.Graph")
    kind = type(optimizer).__name__
    if op is ReduceOp.Adasum:
        return DeltaOptimizer(
            optimizer,
            name or f"DistributedDelta{kind}",
            use_locking,
            device_dense,
            compression,
            backward_passes_per_step,
            process_set,
        )
    name = name or f"Distributed{kind}"
    reduce = make_allreduce_grads_fn(
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        groups,
        process_set,
    )
    helper = None
    if backward_passes_per_step != 1:
        helper = LocalGradientAggregationHelper(
            backward_passes_per_step,
            reduce,
            sparse_as_dense,
            average_aggregated_gradients,
            basics.rank(),
            LocalGradientAggregationHelper._OPTIMIZER_TYPE_LEGACY,
            process_set,
            scale_local_gradients,
            name,
        )
    return _DistributedOptimizer(
        optimizer, name, use_locking, reduce, process_set, scale_local_gradients, helper
    )
