"""Distributed optimizers of Keras 3, on TensorFlow and PyTorch; must not know how data travels.

All ways of Keras 3 to a step lead through ``apply_gradients`` or ``apply``: ``fit``,
``train_on_batch``, an overridden ``train_step``. There gradients are reduced, before anything looks
at them: a LossScaleOptimizer at infinities, clipping at norms. Gradients that a
DistributedGradientTape has reduced are taken as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from horovod._keras.distributed import (
    Distributed,
    Gradient,
    derive,
    distribute_around,
    reduced_outside,
    steps_alone,
    take_over,
)
from horovod._keras.settings import Settings


def wrap(optimizer: Any, settings: Settings) -> Any:
    """Distributes an optimizer of Keras 3, in place.

    Raises:
        ValueError: it adds gradients up already, and was told to do it twice; or it is distributed.
    """
    import keras

    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if settings.backward_passes_per_step > 1 and inner.gradient_accumulation_steps:
        raise ValueError(
            f"gradient_accumulation_steps={inner.gradient_accumulation_steps} of the optimizer and "
            f"backward_passes_per_step={settings.backward_passes_per_step} both add gradients up: "
            f"use one of them"
        )
    distribute_around(keras.optimizers.LossScaleOptimizer, wrap)
    return take_over(optimizer, DistributedKeras3, settings)


class DistributedKeras3(Distributed):
    """Takes the wrapped optimizer's steps with reduced gradients."""

    # Of the class that it is put in front of.
    name: str
    built: bool
    build: Callable[[list[Any]], None]
    learning_rate: Any
    gradient_accumulation_steps: int | None
    _iterations: Any
    _trainable_variables: list[Any]
    _accumulated_gradients: list[Any]
    _get_variable_index: Callable[[Any], int]

    @classmethod
    def _derive(cls, kind: Any, content: dict[str, Any]) -> Any:
        """A class that Keras saves as the one it derives from: files open without horovod."""
        from keras.src import api_export
        from keras.src.saving import object_registration

        derived = derive(cls, kind, {"__module__": kind.__module__, **content})
        registered: tuple[dict[Any, str], ...] = (
            api_export.REGISTERED_OBJS_TO_NAMES,
            object_registration.GLOBAL_CUSTOM_NAMES,
        )
        for names in registered:
            if kind in names:
                names[derived] = names[kind]
        return derived

    def __reduce__(self) -> Any:
        """Copies and pickles what the wrapped class does, and that it is distributed."""
        reduced: Any = super().__reduce__()
        make, arguments, *rest = reduced
        plain = type(self).__bases__[1]  # whose method it is, else it would be one of this class
        make = getattr(plain, make.__name__)
        return _again, (make, arguments, self._horovod_settings), *rest

    def apply(self, grads: Sequence[Gradient], trainable_variables: Any = None) -> None:
        """Reduces the gradients and updates variables, as the wrapped optimizer does.

        All members of the process set must call it. With several passes a step it only adds the
        gradients up, until the last pass.

        Args:
            grads: a gradient or None for each variable.
            trainable_variables: in that order; by default those the optimizer was built with.

        Raises:
            ValueError: the optimizer isn't built and gets no variables, or another number of them.
        """
        plain: Callable[..., Any] = super().apply  # type: ignore[misc]
        grads = list(grads)
        given = trainable_variables is not None
        if not (steps_alone() and grads and (given or self.built)):
            plain(grads, trainable_variables)
            return
        variables = list(trainable_variables if given else self._trainable_variables)
        if len(grads) != len(variables):
            raise ValueError(f"apply() got {len(grads)} gradients for {len(variables)} variables")
        self._take(grads, variables, plain)

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        """As `apply`, with pairs of gradient and variable; also where a class does this otherwise.

        Returns:
            The variable that counts steps.
        """
        plain: Callable[..., Any] = super().apply_gradients  # type: ignore[misc]
        pairs = list(grads_and_vars)
        if not (steps_alone() and pairs):
            return plain(pairs)
        grads, variables = zip(*pairs, strict=True)
        self._take(list(grads), list(variables), lambda *both: plain(zip(*both, strict=True)))
        return self._iterations

    def _take(self, grads: list[Gradient], variables: list[Any], apply: Callable[..., Any]) -> None:
        if isinstance(getattr(self, "inner_optimizer", None), Distributed):
            self._horovod.backend.check_nesting(self._horovod_settings)
        if self.gradient_accumulation_steps:
            self._accumulate(grads, variables, apply)
        else:
            if self._horovod.window is not None:
                self._ensure_built(variables)  # not in the branch that is the window's end
            self._step(grads, variables, apply)

    def _ensure_built(self, variables: list[Any]) -> None:
        from keras import name_scope

        if not self.built:
            with name_scope(self.name, caller=self):
                self.build(variables)

    def _accumulate(
        self, grads: list[Gradient], variables: list[Any], apply: Callable[..., Any]
    ) -> None:
        """Reduces once in ``gradient_accumulation_steps`` passes: the sum that Keras keeps.

        Keras adds to its sums in passes that don't step, which is left to it. In the one that does,
        the sums move into the gradients, all of it is reduced, and Keras adds zeros.
        """
        state = self._horovod
        state.backend.check_replicas()
        self._ensure_built(variables)
        done, apart = self._done(grads), []
        for place, (grad, variable) in enumerate(zip(grads, variables, strict=True)):
            if grad is not None and not getattr(variable, "overwrite_with_gradient", False):
                apart.append(place)
        these = [variables[place] for place in apart]
        flags = [done[place] for place in apart]
        passing = [state.backend.densified(grads[place]) for place in apart]
        sums = [self._accumulated_gradients[self._get_variable_index(one)] for one in these]

        def moved() -> list[Gradient]:
            totals = [grad + kept.value for grad, kept in zip(passing, sums, strict=True)]
            reduced = self._reduced(totals, these, flags)
            for kept in sums:
                kept.assign(kept.value * 0)
            return reduced

        steps = self.gradient_accumulation_steps
        last = (self._iterations + 1) % steps == 0
        chosen = state.backend.cond(last, moved, lambda: passing)
        # What isn't summed, because it replaces the variable, is reduced in every pass.
        rest = [None if place in set(apart) else grad for place, grad in enumerate(grads)]
        result = self._reduced(rest, variables, done)
        for place, grad in zip(apart, chosen, strict=True):
            result[place] = grad
        with reduced_outside():
            apply(result, variables)

    def stateless_apply(
        self,
        optimizer_variables: Sequence[Any],
        grads: Sequence[Gradient],
        trainable_variables: Sequence[Any],
    ) -> Any:
        """Reduces the gradients, and returns updated values as the wrapped optimizer does.

        Raises:
            ValueError: gradients add up over several passes, which no value among these tells; or
                the backend doesn't have this, as TensorFlow.
        """
        stateless: Callable[..., Any] = super().stateless_apply  # type: ignore[misc]
        if not (steps_alone() and self.built and len(grads) == len(self._trainable_variables)):
            return stateless(optimizer_variables, grads, trainable_variables)
        if self._horovod.window is not None:
            raise ValueError("stateless_apply can't add up over backward_passes_per_step")
        reduced = self._reduced(grads, self._trainable_variables, self._done(grads))
        with reduced_outside():
            return stateless(optimizer_variables, reduced, trainable_variables)

    # What scripts for Keras 2 call.

    @property
    def lr(self) -> Any:
        """The learning rate."""
        return self.learning_rate

    @lr.setter
    def lr(self, value: Any) -> None:
        self.learning_rate = value

    def compute_gradients(self, loss: Any, var_list: Any, tape: Any = None) -> list[Any]:
        """Differentiates a loss and reduces the gradients.

        Args:
            loss: a tensor, with the tape that has recorded it, or a function that computes it.
            var_list: the variables.
            tape: a ``tf.GradientTape``.

        Returns:
            Pairs of gradient and variable.
        """
        import tensorflow as tf

        from horovod._keras.flavours import backing

        variables = list(var_list() if callable(var_list) else var_list)
        if callable(loss):
            with tape if tape is not None else tf.GradientTape() as tape:
                loss = loss()
        if tape is None:
            raise ValueError("compute_gradients() of a tensor needs the tape that recorded it")
        grads = tape.gradient(loss, [backing(variable) for variable in variables])
        return list(zip(self._handed_out(grads, variables), variables, strict=True))

    def _compute_gradients(
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None
    ) -> list[Any]:
        if grad_loss is not None:
            raise ValueError("grad_loss is not supported with Keras 3: multiply the loss by it")
        return self.compute_gradients(loss, var_list, tape)

    def minimize(self, loss: Any, var_list: Any, tape: Any = None) -> Any:
        """Differentiates a loss, reduces the gradients, and applies them."""
        return self.apply_gradients(self.compute_gradients(loss, var_list, tape))

    def get_gradients(self, loss: Any, params: Any) -> list[Gradient]:
        """The reduced gradients of a loss, both of the graph that is being made."""
        import tensorflow as tf

        from horovod._keras.flavours import backing

        variables = list(params)
        grads = tf.gradients(loss, [backing(variable) for variable in variables])
        return self._handed_out(grads, variables)

    def _handed_out(self, grads: Sequence[Gradient], variables: list[Any]) -> list[Gradient]:
        if self._horovod.window is not None or self.gradient_accumulation_steps:
            return list(grads)  # they are reduced with those of the passes before
        return self._hand_out(grads, variables)

    def _aggregate_gradients(self, grads_and_vars: Any) -> Any:
        return grads_and_vars


def _again(make: Callable[..., Any], arguments: tuple[Any, ...], settings: Settings) -> Any:
    return wrap(make(*arguments), settings)
