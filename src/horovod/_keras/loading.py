"""Loads saved models and makes their optimizers distributed; must not know how they reduce."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from horovod._keras import create_distributed_optimizer, flavours
from horovod._keras.distributed import Distributed
from horovod.common.compression import NoneCompressor


def loader(keras: Callable[[], Any]) -> Callable[..., Any]:
    """Makes the ``load_model`` of a face.

    Args:
        keras: gives the Keras whose models it loads.
    """

    def load_model(
        filepath: Any,
        custom_optimizers: Any = None,
        custom_objects: Any = None,
        compression: Any = NoneCompressor,
        legacy_opts: bool = False,
    ) -> Any:
        """Loads a saved model and makes its optimizer distributed, with the state it had.

        Args:
            filepath: what Keras saved, whether or not its optimizer was distributed.
            custom_optimizers: optimizer classes that aren't Keras's own.
            custom_objects: other classes and functions by name, as for ``keras.models.load_model``.
            compression: for the optimizer, see ``DistributedOptimizer``.
            legacy_opts: not needed any more: the file tells which optimizer it is.

        Returns:
            The model, compiled if it was saved so.
        """
        known = {kind.__name__: kind for kind in custom_optimizers or ()}
        known.update(custom_objects or {})
        model = keras().models.load_model(filepath, custom_objects=known)
        if getattr(model, "optimizer", None) is None:
            return model
        if flavours.is_keras3_optimizer(model.optimizer):
            _build_again(model, filepath)
        if not isinstance(model.optimizer, Distributed):
            create_distributed_optimizer(None, model.optimizer, compression=compression)
        return model

    return load_model


def _build_again(model: Any, filepath: Any) -> None:
    """Gives a model of Keras 3 from an HDF5 file an optimizer that it can train with.

    Keras (3.15 and before) builds the one in such a file for no variables: it has lost its slots,
    and refuses the model's variables.
    """
    lost = model.optimizer
    if not (lost.built and model.trainable_variables and not lost._trainable_variables):
        return
    import h5py
    from keras.src.legacy.saving.legacy_h5_format import load_optimizer_weights_from_hdf5_group

    model.optimizer = type(lost).from_config(lost.get_config())
    model.optimizer.build(model.trainable_variables)
    with h5py.File(filepath, "r") as file:
        model.optimizer.set_weights(load_optimizer_weights_from_hdf5_group(file))
