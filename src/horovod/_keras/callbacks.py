"""What the callbacks do, for either Keras; must not know which, nor import one.

A public callback derives from one of these, and then from the ``Callback`` of its Keras: see
`public`.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, MutableMapping
from typing import Any

import numpy as np

from horovod._keras import flavours
from horovod._keras.distributed import backend
from horovod.common import basics

Logs = MutableMapping[str, Any] | None


class BroadcastGlobalVariablesCallbackImpl:
    """Gives all ranks the variables of one, after the first batch, when the optimizer has its own.

    That step is taken with weights that may differ, and then overwritten. All ranks must have it.
    In a later ``fit`` it does so with variables that are new: of another model or optimizer, or of
    a layer that got more.

    Args:
        root_rank: global rank of the one whose variables count.
        device: where TensorFlow broadcasts; empty for its own choice.
        local_variables: a variable or a list of those that stay as they are on each rank.

    Raises:
        ValueError: a local variable is none.
    """

    model: Any

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.broadcast_done = False
        self._given: dict[int, weakref.ref[Any]] = {}  # what was broadcast, by id
        self._local: set[Any] = set()
        if local_variables is not None:
            several = isinstance(local_variables, (list, tuple, set))
            for variable in local_variables if several else [local_variables]:
                self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """Says that a variable stays as it is on each rank.

        Raises:
            ValueError: it is no variable.
        """
        if not flavours.is_variable(var):
            raise ValueError(f"local_variables must be variables; {var!r} is none")
        self._local.update(flavours.keys(var))

    def on_train_begin(self, logs: Logs = None) -> None:
        """Looks for new variables again, at the end of the first batch."""
        self.broadcast_done = False

    def on_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Broadcasts once, and only what it hasn't before."""
        if self.broadcast_done:
            return
        variables = [*self.model.variables, *flavours.state_of(self.model)]
        # The variables of a model may be those of its optimizer, too.
        once = {id(flavours.backing(variable)): variable for variable in variables}
        kept = [
            one
            for key, one in once.items()
            if self._local.isdisjoint(flavours.keys(one))
            and (key not in self._given or self._given[key]() is not flavours.backing(one))
        ]
        tensors = backend(flavours.backend_of(getattr(self.model, "optimizer", None)))
        with tensors.placed(self.device):
            tensors.broadcast_variables(kept, self.root_rank)
        for backing in map(flavours.backing, kept):
            self._given[id(backing)] = weakref.ref(backing)
        self.broadcast_done = True


class MetricAverageCallbackImpl:
    """Averages the metrics of an epoch over all ranks, in place, for the callbacks after it.

    All ranks must have the same metrics, so validate on all or none.

    Args:
        device: where TensorFlow reduces; empty for its own choice.
    """

    model: Any

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Averages what is in `logs`.

        Raises:
            ValueError: ranks have different metrics.
        """
        if not logs:
            return
        own = {name: float(value) for name, value in logs.items()}
        tensors = backend(flavours.backend_of(getattr(self.model, "optimizer", None)))
        with tensors.placed(self.device):
            everyone = tensors.allgather_object(own, name="metrics")
        if any(one.keys() != own.keys() for one in everyone):
            has = "; ".join(f"rank {rank}: {sorted(one)}" for rank, one in enumerate(everyone))
            raise ValueError(f"metrics can't be averaged, since ranks have different ones: {has}")
        logs.update({name: sum(one[name] for one in everyone) / len(everyone) for name in own})


class LearningRateScheduleCallbackImpl:
    """Sets the learning rate to ``initial_lr * multiplier(epoch)``.

    Args:
        initial_lr: the rate that is multiplied.
        multiplier: a function of the epoch, or a number m: ``m ** (epoch - start_epoch)``.
        start_epoch: the first epoch in which it acts.
        end_epoch: the first one in which it doesn't any more, None for never.
        staircase: act at the start of an epoch only. Otherwise at each batch, with a fraction of
            an epoch.
        momentum_correction: scale a momentum by new / old rate during the batch after a change
            (arXiv:1706.02677, section 2.1). Where the optimizer keeps it as a number, fixed when a
            step is compiled, this warns and does nothing.
        steps_per_epoch: batches in an epoch; by default what Keras knows.

    Raises:
        ValueError: `initial_lr` is None.
    """

    model: Any
    params: Any

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("initial_lr must be a number: the rate that is multiplied")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        self._restore_momentum: Any = None
        if callable(multiplier):
            self.multiplier = multiplier
        else:
            base = float(multiplier)
            self.multiplier = lambda epoch: base ** (epoch - start_epoch)

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Remembers the epoch."""
        self.current_epoch = epoch

    def on_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Sets the rate."""
        epoch = self.current_epoch
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        if not self.staircase:
            self._set(self.initial_lr * self.multiplier(epoch + batch / self._steps()))
        elif batch == 0:
            self._set(self.initial_lr * self.multiplier(epoch))

    def on_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Gives the momentum its own value back."""
        if self._restore_momentum is not None:
            momentum, value = self._restore_momentum
            momentum.assign(value)
            self._restore_momentum = None

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Tells the rate, by the names it has in either Keras."""
        if logs is not None:
            rate = self._rate()
            logs["lr"] = logs["learning_rate"] = rate

    def _rate(self) -> float:
        return float(np.asarray(flavours.backing(self.model.optimizer.learning_rate)))

    def _set(self, new: float) -> None:
        optimizer = self.model.optimizer
        if not hasattr(optimizer.learning_rate, "assign") and not isinstance(
            optimizer.learning_rate, (int, float)
        ):
            raise ValueError(
                f"the learning rate of {type(optimizer).__name__} is a schedule or a function, "
                f"which {type(self).__name__} can't set: give the optimizer a number"
            )
        old = self._rate()
        optimizer.learning_rate = new
        momentum = getattr(optimizer, "momentum", None)
        if not self.momentum_correction or momentum is None or old == 0 or old == new:
            return
        if hasattr(momentum, "assign"):
            value = float(np.asarray(flavours.backing(momentum)))
            momentum.assign(value * new / old)
            self._restore_momentum = momentum, value
        elif momentum:
            warnings.warn(
                f"{type(optimizer).__name__} keeps its momentum as a number, so it can't be "
                f"corrected while the learning rate changes: pass momentum_correction=False",
                stacklevel=2,
            )
            self.momentum_correction = False

    def _steps(self) -> int:
        if not self.steps_per_epoch:
            params = self.params or {}
            steps = params.get("steps")
            if not steps and params.get("samples") and params.get("batch_size"):
                steps = params["samples"] // params["batch_size"]
            if not steps:
                raise ValueError(
                    f"{type(self).__name__} can't tell how many batches an epoch has: pass "
                    f"steps_per_epoch="
                )
            self.steps_per_epoch = steps
        return self.steps_per_epoch


class LearningRateWarmupCallbackImpl(LearningRateScheduleCallbackImpl):
    """Raises the learning rate from ``initial_lr / size`` to ``initial_lr``, batch by batch.

    With the rate of one process times the number of ranks this is the warm-up of
    arXiv:1706.02677, section 2.2.

    Args:
        initial_lr: the rate that it ends with.
        warmup_epochs: how long it takes.
        momentum_correction: see `LearningRateScheduleCallbackImpl`.
        steps_per_epoch: see there.
        verbose: whether rank 0 prints when it is done.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            size = basics.size()
            reached = epoch + 1.0 / self._steps()  # the rate of a batch is that of its end
            return (reached * (size - 1) / warmup_epochs + 1) / size

        super().__init__(
            initial_lr,
            multiplier,
            start_epoch=0,
            end_epoch=warmup_epochs,  # type: ignore[arg-type]  # a part of an epoch is fine
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Tells the rate, and once that the warm-up is over."""
        super().on_epoch_end(epoch, logs)
        over = self.end_epoch is not None and epoch == self.end_epoch - 1
        if over and self.verbose > 0 and basics.rank() == 0:
            sys.stdout.write(
                f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {self._rate():g}.\n"
            )


class BestModelCheckpointImpl:
    """A ``ModelCheckpoint`` of the best model so far; set its ``filepath`` before training.

    Args:
        monitor: as for ``ModelCheckpoint``, as all of them.
        verbose: see there.
        save_weights_only: see there.
        mode: see there.
        save_freq: see there.
    """

    filepath: str | None

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: Any = "epoch",
    ) -> None:
        super().__init__(  # type: ignore[call-arg]
            filepath="unset.weights.h5" if save_weights_only else "unset.keras",
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath = None

    def on_train_begin(self, logs: Logs = None) -> None:
        """Checks that there is a path.

        Raises:
            ValueError: ``filepath`` wasn't set.
        """
        if self.filepath is None:
            raise ValueError("set the filepath of BestModelCheckpoint before training")
        super().on_train_begin(logs)  # type: ignore[misc]


_IMPLEMENTATIONS = (
    BroadcastGlobalVariablesCallbackImpl,
    MetricAverageCallbackImpl,
    LearningRateScheduleCallbackImpl,
    LearningRateWarmupCallbackImpl,
    BestModelCheckpointImpl,
)


def public(keras: Any, module: str) -> tuple[Any, ...]:
    """The callbacks of a module, on the base classes of a Keras, in the order of the file."""
    made = []
    for kind in _IMPLEMENTATIONS:
        checkpoint = kind is BestModelCheckpointImpl
        base = keras.callbacks.ModelCheckpoint if checkpoint else keras.callbacks.Callback
        content = {"__module__": module, "__doc__": kind.__doc__}
        made.append(type(kind.__name__.removesuffix("Impl"), (kind, base), content))
    return tuple(made)
