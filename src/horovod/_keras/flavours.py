"""Tells which Keras an object comes from, Keras 3 or tf-keras; must not know what is done with it.

Both may be in one process. A Keras that was never imported has no objects, so nothing is imported
here; asking costs a look at ``sys.modules``.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Hashable, Sequence
from typing import Any


def _loaded(module: str) -> Any:
    return sys.modules.get(module)


def standalone() -> Any:
    """The Keras of scripts that don't say ``tf.keras``: tf-keras where TensorFlow was told to."""
    tensorflow = _loaded("tensorflow")
    if tensorflow is not None and tensorflow.keras.Model.__module__.startswith("tf_keras."):
        return tensorflow.keras
    import keras

    return keras


def is_keras3_optimizer(thing: object) -> bool:
    """Whether it is an optimizer of Keras 3, on any backend."""
    keras = _loaded("keras")
    return keras is not None and isinstance(thing, keras.optimizers.Optimizer)


def is_tf_keras_optimizer(thing: object) -> bool:
    """Whether it is an optimizer of tf-keras, new or legacy."""
    keras = _loaded("tf_keras")
    if keras is None:
        return False
    kinds = (keras.optimizers.Optimizer, keras.optimizers.legacy.Optimizer)
    return isinstance(thing, kinds)


def is_layer(thing: object) -> bool:
    """Whether it is a layer or model of either Keras."""
    loaded = [_loaded(name) for name in ("keras", "tf_keras")]
    return any(keras is not None and isinstance(thing, keras.layers.Layer) for keras in loaded)


def is_keras_variable(thing: object) -> bool:
    """Whether it is a variable of Keras 3, which holds one of its backend."""
    keras = _loaded("keras")
    return keras is not None and isinstance(thing, getattr(keras, "Variable", ()))


def is_variable(thing: object) -> bool:
    """Whether it is a variable of Keras 3, TensorFlow or PyTorch."""
    tensorflow, torch = _loaded("tensorflow"), _loaded("torch")
    return (
        is_keras_variable(thing)
        or (tensorflow is not None and isinstance(thing, tensorflow.Variable))
        or (torch is not None and isinstance(thing, torch.nn.Parameter))
    )


def backing(variable: Any) -> Any:
    """The variable of the backend that a variable of Keras 3 holds; others are their own."""
    return variable.value if is_keras_variable(variable) else variable


def keys(variable: Any) -> tuple[Hashable, Hashable]:
    """What a variable is known by; never its name, which is often that of others too.

    Inside of ``stateless_apply`` a variable holds another value, hence the two.
    """
    return id(variable), id(backing(variable))


def backend_of(thing: object) -> str:
    """The name of the framework whose tensors an optimizer works on."""
    if is_keras3_optimizer(thing):
        return active_backend()
    return "tensorflow"


def active_backend() -> str:
    """The backend of Keras 3 in this process; TensorFlow where Keras 3 isn't loaded."""
    keras = _loaded("keras")
    return "tensorflow" if keras is None else str(keras.config.backend())


def models_of(optimizer: object) -> list[Any]:
    """The models that were compiled with an optimizer, or with one around it.

    An optimizer doesn't know them, so it is the garbage collector that is asked.
    """
    holders = gc.get_referrers(optimizer)
    holders += [one for each in holders if isinstance(each, dict) for one in gc.get_referrers(each)]
    models: list[Any] = []
    for one in {id(one): one for one in holders}.values():
        if is_layer(one):
            models += [one] if getattr(one, "optimizer", None) is optimizer else []
        elif is_keras3_optimizer(one) or is_tf_keras_optimizer(one):
            around = getattr(one, "inner_optimizer", None) is optimizer
            models += models_of(one) if around else []
    return models


def state_of(model: Any) -> Sequence[Any]:
    """The variables of a model's optimizer that are equal on all ranks; none if it has none.

    What Keras 3 adds up for ``gradient_accumulation_steps`` is each rank's own until it is reduced.
    """
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return []
    variables = optimizer.variables
    sums = {id(one) for one in getattr(optimizer, "_accumulated_gradients", ())}
    return [
        one for one in (variables() if callable(variables) else variables) if id(one) not in sums
    ]
