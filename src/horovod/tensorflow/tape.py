"""Gradient tapes whose gradients are reduced over ranks; must not know how that is done."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import tensorflow as tf

from horovod.common.ops import ReduceOp
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.internals import unconverted
from horovod.tensorflow.reduction import (
    check_arguments,
    make_allreduce_grads_fn,
    mark_reduced,
    reduce_global,
)
from horovod.tensorflow.util import backing, key_of, trainable_weights


class _DistributedTape(tf.GradientTape):
    """What is put in front of a tape's class."""

    def _distribute(self, reduce: Any, process_set: ProcessSet, scale_local: bool) -> None:
        """Stands in for ``__init__``: what the tape has recorded is there already."""
        self._allreduce_grads = reduce
        self._local_sources: set[Hashable] = set()
        self.process_set = process_set
        self.scale_local_gradients = scale_local

    def register_local_source(self, source: Any) -> None:
        """Says that a variable or watched tensor is this rank's own: its gradient stays local."""
        self._local_sources.add(key_of(source))

    @unconverted
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
        use_generic_names: bool = False,
    ) -> Any:
        """Takes this rank's gradients, and reduces them over the process set.

        All members must call it, with the same sources in the same order. In eager code it blocks
        until they have.

        Args:
            target: what is differentiated, as for a plain tape.
            sources: variables of TensorFlow or Keras 3, or watched tensors; one or any structure.
            output_gradients: as for a plain tape.
            unconnected_gradients: as for a plain tape.
            use_generic_names: makes no difference: gradients match by their places in `sources`.

        Returns:
            One gradient a source, in the structure of `sources`.
        """
        flat = [backing(source) for source in tf.nest.flatten(sources)]
        own = super().gradient(target, flat, output_gradients, unconnected_gradients)
        grads = reduce_global(
            functools.partial(self._allreduce_grads, use_generic_names=use_generic_names),
            own,
            flat,
            self._local_sources,
            self.scale_local_gradients,
            self.process_set,
        )
        mark_reduced(grads)
        return tf.nest.pack_sequence_as(sources, grads)

    def get_local_and_global_gradients(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """As `gradient`, but gives pairs: those of local sources, and all others.

        Returns:
            Two lists of ``(source, gradient)``, each in the order of the sources.
        """
        flat = tf.nest.flatten(sources)
        grads = self.gradient(target, flat, output_gradients, use_generic_names=use_generic_names)
        pairs = list(zip(flat, grads, strict=True))
        local = [pair for pair in pairs if key_of(pair[0]) in self._local_sources]
        shared = [pair for pair in pairs if key_of(pair[0]) not in self._local_sources]
        return local, shared

    def jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """Is not reduced, so it isn't here.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("a distributed tape has no jacobian: take it from a plain tape")

    def batch_jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """Is not reduced, so it isn't here.

        Raises:
            NotImplementedError: always.
        """
        return self.jacobian()


@functools.cache
def _derived(kind: Any) -> Any:
    if kind is tf.GradientTape:
        return _DistributedTape
    return type(kind.__name__, (_DistributedTape, kind), {"__doc__": kind.__doc__})


def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = ReduceOp.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Makes a tape whose gradients are those of all ranks together.

    The result shares what `gradtape` has recorded, and is itself a tape: it may be used in place of
    `gradtape` from then on, also as a context manager. It is cheap; make one a step::

        with tf.GradientTape() as tape:
            loss = loss_of(model(x), y)
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)

    Second derivatives go through the reduction if an outer tape watches it.

    Args:
        gradtape: the tape; persistent or not, usually already exited.
        device_dense: where dense gradients are reduced; empty for TensorFlow's own choice.
        device_sparse: the same for IndexedSlices.
        compression: what travels, see `Compression`; not applied to IndexedSlices.
        sparse_as_dense: makes IndexedSlices dense before they are reduced.
        op: Average, Sum or Adasum.
        gradient_predivide_factor: f: Average divides by f before and by size / f after the sum.
        num_groups: deprecated: the same as a number for `groups`.
        groups: None for what is fastest; n for n calls; or a list of lists of variables, each
            list in one call and every other variable alone.
        process_set: over whom. A rank outside of it keeps its own gradients.
        scale_local_gradients: divides gradients of local sources by the size of the set.

    Raises:
        ValueError: an argument is none of these, the tape is distributed already, or horovod isn't
            initialized.
        TypeError: `gradtape` is no tape.
    """
    return PartialDistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        None,
        scale_local_gradients,
    )


def PartialDistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = ReduceOp.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """As `DistributedGradientTape`, for a model of which some layers are this rank's own.

    Args:
        gradtape: see `DistributedGradientTape`, as for all that isn't named here.
        device_dense: see there.
        device_sparse: see there.
        compression: see there.
        sparse_as_dense: see there.
        op: see there.
        gradient_predivide_factor: see there.
        num_groups: see there.
        groups: see there.
        process_set: see there.
        local_layers: a Keras layer or a list of them, built already, whose weights exist on this
            rank alone. Ranks may differ in them.
        scale_local_gradients: divides their gradients by the size of the set, which makes them
            those of the mean of the ranks' losses.

    Raises:
        ValueError: `local_layers` are none, or as for `DistributedGradientTape`.
        TypeError: `gradtape` is no tape.
    """
    if not isinstance(gradtape, tf.GradientTape):
        raise TypeError(f"a tf.GradientTape is needed, not {type(gradtape).__name__}")
    if isinstance(gradtape, _DistributedTape):
        raise ValueError("the tape is distributed already: its gradients would be reduced twice")
    groups = check_arguments(op, gradient_predivide_factor, num_groups, groups)
    local = [] if local_layers is None else trainable_weights(local_layers)
    plain: Any = type(gradtape)
    kind = _derived(plain)
    tape = kind.__new__(kind)
    vars(tape).update(vars(gradtape), _recording=False)  # it is the given tape that has to stop
    reduce = make_allreduce_grads_fn(
        "DistributedGradientTape",
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        groups,
        process_set,
    )
    tape._distribute(reduce, process_set, scale_local_gradients)
    for weight in local:
        tape.register_local_source(weight)
    return tape
