"""What the callbacks do in ``fit``, and when they are called by hand."""

from __future__ import annotations

import importlib
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import horovod.tensorflow.keras as hvd
import small
from horovod._keras import callbacks as implementations
from small import KERAS3, ROWS, K

BATCHES = 4


class Recorder(K.callbacks.Callback):
    """Notes the learning rate that each batch is trained with, and the logs of epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []
        self.logs: list[dict[str, float]] = []

    def on_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.rates.append(float(np.asarray(self.model.optimizer.learning_rate)))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.logs.append(dict(logs))


def fit(opt: Any, callbacks: list[Any], epochs: int = 1, **options: Any) -> Any:
    model = options.pop("model", None) or small.model()
    model.compile(optimizer=opt, loss="mse", **options)
    x, y = (small.own(values) for values in small.data("dense", BATCHES))
    model.fit(x, y, batch_size=ROWS, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks)
    return model


@pytest.mark.np(2)
def test_broadcast_after_the_first_batch() -> None:
    model = small.model()
    model.set_weights([one + hvd.rank() for one in model.get_weights()])
    local = model.trainable_variables[0]
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(1, local_variables=[local])
    done = []

    class Spy(K.callbacks.Callback):
        def on_batch_end(self, batch: int, logs: Any = None) -> None:
            done.append((callback.broadcast_done, *small.weights(model)))

    opt = hvd.DistributedOptimizer(K.optimizers.Adam(0.1))
    opt.register_local_var(local)
    fit(opt, [callback, Spy()], model=model)
    first = np.asarray(hvd.allgather(np.array(done[:1], np.float64)))
    assert first[0, 0] == 1.0
    kept = local.shape[0] * local.shape[1]
    assert small.different(first[0, 1 : 1 + kept], first[1, 1 : 1 + kept])
    np.testing.assert_array_equal(first[0, 1 + kept :], first[1, 1 + kept :])
    others = [one for one in opt.variables if one.shape != local.shape]
    small.same_everywhere(small.weights(others))


@pytest.mark.np(2)
def test_broadcast_called_by_hand() -> None:
    model, callback = small.model(), hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    start = small.weights(model)
    model.set_weights([one * (1 - hvd.rank()) for one in model.get_weights()])
    callback.set_model(model)
    callback.on_batch_end(0)
    assert callback.broadcast_done
    small.equal(small.weights(model), start)
    with pytest.raises(ValueError, match="variables"):
        hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=["kernel"])


@pytest.mark.np(2)
def test_a_callback_that_is_used_again_broadcasts_what_is_new() -> None:
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    layer = K.layers.Dense(4, dtype="float64")
    for _ in range(2):  # the second time with a new head and optimizer
        model = K.Sequential([K.Input((3,), dtype="float64"), layer, K.layers.Dense(1)])
        model.layers[-1].set_weights([one + hvd.rank() for one in model.layers[-1].get_weights()])
        fit(hvd.DistributedOptimizer(K.optimizers.Adam(0.1)), [callback], model=model)
        small.same_everywhere(small.weights(model))
    with_own = layer.get_weights()[0] + hvd.rank()
    layer.set_weights([with_own, *layer.get_weights()[1:]])
    callback.on_train_begin()
    callback.on_batch_end(0)
    small.equal(layer.get_weights()[0], with_own)


@pytest.mark.np(2)
def test_metrics_are_averaged_for_those_after() -> None:
    logs: Any = {"loss": 1.0 + hvd.rank(), "accuracy": np.float32(hvd.rank())}
    callback = hvd.callbacks.MetricAverageCallback()
    callback.set_model(small.model())
    callback.on_epoch_end(0, logs)
    assert logs == {"loss": 1.5, "accuracy": 0.5}
    with pytest.raises(ValueError, match=r"rank 0: \['loss', 'val_loss'\]; rank 1: \['loss'\]"):
        callback.on_epoch_end(1, {"loss": 1.0, **({"val_loss": 1.0} if hvd.rank() == 0 else {})})
    before, after = Recorder(), Recorder()
    opt = hvd.DistributedOptimizer(K.optimizers.SGD(0.1))
    fit(opt, [before, hvd.callbacks.MetricAverageCallback(), after])
    mean = float(np.asarray(hvd.allreduce(np.float64(before.logs[0]["loss"]))))
    small.equal(after.logs[0]["loss"], mean)
    assert before.logs[0]["loss"] != mean


@pytest.mark.np(2)
def test_warmup() -> None:
    recorder, epochs, rate = Recorder(), 3, 0.5
    warmup = hvd.callbacks.LearningRateWarmupCallback(rate, warmup_epochs=2)
    fit(hvd.DistributedOptimizer(K.optimizers.SGD(rate)), [warmup, recorder], epochs=epochs)
    reached = [min((at + 1) / BATCHES / 2, 1.0) for at in range(epochs * BATCHES)]
    size = hvd.size()
    small.equal(recorder.rates, [rate / size * (e * (size - 1) + 1) for e in reached], 1e-6)
    small.equal(recorder.logs[-1]["lr"], rate, 1e-6)
    small.equal(recorder.logs[-1]["learning_rate"], rate, 1e-6)


@pytest.mark.np(2)
def test_schedule() -> None:
    rates = {}
    for name, options in {
        "number": {"multiplier": 0.5, "start_epoch": 1, "end_epoch": 3},
        "function": {"multiplier": lambda epoch: 1 / (1 + epoch), "staircase": False},
    }.items():
        recorder = Recorder()
        callback = hvd.callbacks.LearningRateScheduleCallback(0.5, **options)
        fit(hvd.DistributedOptimizer(K.optimizers.SGD(1.0)), [callback, recorder], epochs=4)
        rates[name] = recorder.rates
    steps = np.repeat([1.0, 0.5, 0.25, 0.25], BATCHES)
    small.equal(rates["number"], steps, 1e-6)
    small.equal(rates["function"], [0.5 / (1 + at / BATCHES) for at in range(4 * BATCHES)], 1e-6)
    with pytest.raises(ValueError, match="initial_lr"):
        hvd.callbacks.LearningRateScheduleCallback(None, 1.0)


@pytest.mark.np(2)
def test_a_rate_that_is_a_schedule_can_not_be_set() -> None:
    schedule = K.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    callback = hvd.callbacks.LearningRateScheduleCallback(0.5, 0.5)
    with pytest.raises((ValueError, TypeError), match=r"schedule|settable|LearningRateSchedule"):
        fit(hvd.DistributedOptimizer(K.optimizers.SGD(schedule)), [callback])


@pytest.mark.np(2)
def test_momentum_is_corrected_where_it_can_be() -> None:
    callback = hvd.callbacks.LearningRateScheduleCallback(0.5, 0.5)
    if KERAS3:
        with pytest.warns(UserWarning, match="pass momentum_correction=False"):
            fit(hvd.DistributedOptimizer(K.optimizers.SGD(1.0, momentum=0.5)), [callback])
        return
    opt = hvd.DistributedOptimizer(K.optimizers.legacy.SGD(1.0, momentum=0.5))
    seen = []

    class Spy(K.callbacks.Callback):
        def on_batch_begin(self, batch: int, logs: Any = None) -> None:
            seen.append(float(np.asarray(opt.momentum)))

    fit(opt, [callback, Spy()])
    small.equal(seen, [0.25, *[0.5] * (BATCHES - 1)], 1e-6)
    small.equal(float(np.asarray(opt.momentum)), 0.5)


@pytest.mark.np(2)
@pytest.mark.parametrize("only", [False, True])
def test_best_model(only: bool) -> None:
    folder = tempfile.mkdtemp()
    callback = hvd.callbacks.BestModelCheckpoint(monitor="loss", save_weights_only=only)
    with pytest.raises(ValueError, match="filepath"):
        fit(K.optimizers.SGD(0.01), [callback])
    callback.filepath = f"{folder}/best{'.weights.h5' if only else '.keras'}"
    fit(K.optimizers.SGD(0.01), [callback])
    assert Path(callback.filepath).exists()


@pytest.mark.np(2)
def test_callbacks_are_of_the_face_and_of_the_implementation() -> None:
    for face in ("horovod.keras.callbacks", "horovod.tensorflow.keras.callbacks"):
        module = importlib.import_module(face)
        for name in module.__all__:
            kind = getattr(module, name)
            assert kind.__mro__[1] is getattr(implementations, f"{name}Impl")
            assert issubclass(kind, K.callbacks.Callback)
            assert kind.__module__ == face


@pytest.mark.np(2)
@pytest.mark.parametrize("face", ["horovod.keras", "horovod.tensorflow.keras"])
def test_values(face: str) -> None:
    module = importlib.import_module(face)
    rank, size = hvd.rank(), hvd.size()
    total = sum(range(size))
    for found, expected in (
        (module.allreduce(float(rank)), total / size),
        (module.allreduce([rank], op=module.Sum), [total]),
        (module.allreduce(np.array([rank, 1.0]), op=module.Max, name="largest"), [size - 1, 1]),
        (module.allreduce(np.float64(rank), op=module.Sum, prescale_factor=2.0), 2 * total),
        (module.allgather([rank]), list(range(size))),
        (module.broadcast([rank, 7], 1), [1, 7]),
        (module.reducescatter(np.ones(2 * size) * rank), [total / size] * 2),
    ):
        np.testing.assert_allclose(found.numpy(), expected)
    with pytest.warns(DeprecationWarning):
        assert float(module.allreduce(1.0, average=False)) == size
    with pytest.raises(ValueError, match="op"):
        module.allreduce(1.0, average=True, op=module.Sum)
    with pytest.raises(RuntimeError):
        module.broadcast_global_variables(0)
