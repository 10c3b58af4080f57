"""Distributed optimizers of tf-keras, new and legacy; must not know how data travels.

Scripts for Keras 2 expect reduced gradients of ``compute_gradients``, which ``fit`` uses. Others
call ``apply_gradients`` with what a plain tape gave them; then that reduces. Whoever got reduced
gradients from either finds them marked, so none is reduced twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from horovod._keras.distributed import (
    Distributed,
    derive,
    distribute_around,
    reduced_outside,
    steps_alone,
    take_over,
)
from horovod._keras.settings import Settings

_CALLED = "horovod._keras"


def wrap(optimizer: Any, settings: Settings) -> Any:
    """Distributes an optimizer of tf-keras, in place.

    Raises:
        ValueError: it is distributed already.
    """
    import tf_keras

    for kind in tf_keras.mixed_precision.LossScaleOptimizer.__subclasses__():
        distribute_around(kind, wrap)
    return take_over(optimizer, DistributedTfKeras, settings)


class DistributedTfKeras(Distributed):
    """Takes the wrapped optimizer's steps with reduced gradients."""

    iterations: Any  # of the class that it is put in front of

    @classmethod
    def _derive(cls, kind: Any, content: dict[str, Any]) -> Any:
        """A class that tf-keras saves under the public name of the one it derives from.

        One without such a name is saved by its module, which is then that of the plain class.
        """
        public = {key: value for key, value in vars(kind).items() if "_api_names" in key}
        module = {"__module__": _CALLED if public else kind.__module__}
        return derive(cls, kind, {**module, **public, **content})

    def compute_gradients(self, loss: Any, var_list: Any, *args: Any, **kwargs: Any) -> list[Any]:
        """Differentiates a loss and reduces the gradients; arguments as for the wrapped optimizer.

        Returns:
            Pairs of gradient and variable.
        """
        plain: Any = super()
        compute = getattr(plain, "compute_gradients", None) or plain._compute_gradients
        return self._handed_out(compute, loss, var_list, *args, **kwargs)

    def _compute_gradients(
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None
    ) -> list[Any]:
        plain: Any = super()
        if hasattr(plain, "_compute_gradients"):
            return self._handed_out(plain._compute_gradients, loss, var_list, grad_loss, tape)
        if grad_loss is not None:
            raise ValueError("grad_loss works with legacy optimizers only: multiply the loss by it")
        return self.compute_gradients(loss, var_list, tape=tape)

    def get_gradients(self, loss: Any, params: Any) -> list[Any]:
        """The reduced gradients of a loss, both of the graph that is being made."""
        plain: Any = super()
        get = getattr(plain, "get_gradients", tf.gradients)

        def pairs() -> list[Any]:
            return list(zip(get(loss, params), params, strict=True))

        return [grad for grad, _ in self._handed_out(pairs)]

    def _handed_out(self, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        if not steps_alone():
            return list(compute(*args, **kwargs))
        with reduced_outside():  # by this one, not by the optimizer inside of it
            pairs = list(compute(*args, **kwargs))
        if self._horovod.window is not None or not pairs:
            return pairs  # they are reduced with those of the passes before
        grads, variables = zip(*pairs, strict=True)
        return list(zip(self._hand_out(grads, variables), variables, strict=True))

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """Reduces gradients that aren't yet, and updates variables as the wrapped optimizer does.

        All members of the process set must call it. With several passes a step it only adds the
        gradients up, until the last pass.
        """
        plain: Callable[..., Any] = super().apply_gradients  # type: ignore[misc]
        pairs = list(grads_and_vars)
        if not pairs or not steps_alone():
            return plain(pairs, *args, **kwargs)
        grads, variables = zip(*pairs, strict=True)
        if self._horovod.window is not None:
            self._ensure_built(variables)  # not in the branch that is the window's end

        def apply(reduced: list[Any], these: list[Any]) -> Any:
            return plain(list(zip(reduced, these, strict=True)), *args, **kwargs)

        result = self._step(grads, variables, apply)
        return self.iterations if self._horovod.window is not None else result

    def _ensure_built(self, variables: Any) -> None:
        plain: Any = super()
        build = getattr(plain, "build", None) or plain._create_all_weights
        name = vars(self).get("name") or vars(self).get("_name") or "optimizer"
        with tf.name_scope(name), tf.init_scope():
            build(variables)

    def _aggregate_gradients(self, grads_and_vars: Any) -> Any:
        plain: Any = super()
        legacy = getattr(plain, "_aggregate_gradients", None)
        return grads_and_vars if legacy is None else legacy(grads_and_vars)
