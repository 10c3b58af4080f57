"""What the faces for ``tf.keras`` and ``keras`` share; makes optimizers distributed."""

from __future__ import annotations

from typing import Any

from horovod._keras import flavours
from horovod._keras.distributed import CallableList, backend
from horovod._keras.settings import checked
from horovod.common import basics
from horovod.common.compression import NoneCompressor
from horovod.common.ops import ReduceOp
from horovod.common.process_sets import ProcessSet, global_process_set

__all__ = ["CallableList", "create_distributed_optimizer"]


def create_distributed_optimizer(
    keras: Any,
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = NoneCompressor,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = ReduceOp.Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    *,
    num_groups: int = 0,
) -> Any:
    """Makes an optimizer distributed, in place; `keras` isn't used: the object tells which it is.

    See `horovod._keras.face.DistributedOptimizer` for the arguments and errors.
    """
    settings = checked(
        name=name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    basics.size()  # without init() each rank would train alone, in silence
    keras3 = flavours.is_keras3_optimizer(optimizer)
    if not keras3 and not flavours.is_tf_keras_optimizer(optimizer):
        raise ValueError(f"{optimizer!r} is no optimizer of Keras 3 or tf-keras")
    backend(flavours.backend_of(optimizer)).check_replicas()
    if keras3:
        from horovod._keras.keras3 import wrap
    else:
        from horovod._keras.tf_keras import wrap
    distributed = wrap(optimizer, settings)
    for model in flavours.models_of(distributed):
        model.train_function = None  # if it has trained, that was compiled with plain steps
    if name is not None:
        attribute = "name" if hasattr(distributed, "name") else "_name"
        setattr(distributed, attribute, name)
    return distributed
