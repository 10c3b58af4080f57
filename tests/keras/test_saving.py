"""What a distributed optimizer leaves in files is a plain one; load_model distributes it again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import horovod.tensorflow as hvd_tf
import horovod.tensorflow.keras as hvd
import small
from small import KERAS3, ROWS, K

FORMATS = ["model.keras", "model.h5", "model.weights.h5"]
BATCHES = 4

# Runs where horovod can't be imported: opens files and trains on. Prints what it has afterwards.
ELSEWHERE = """
import json, sys
import numpy as np
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "horovod":
            raise ImportError("there is no horovod here")
sys.meta_path.insert(0, Blocker())
import keras, tf_keras
found = {}
for flavour, K in (("keras3", keras), ("tf_keras", tf_keras)):
    for name in ("model.keras", "model.h5"):
        model = K.models.load_model(f"{sys.argv[1]}/{flavour}/{name}")
        kind = type(model.optimizer)
        assert kind is K.optimizers.Adam, kind
        if K is keras and name == "model.h5":
            continue  # Keras 3 opens it, but can't train it, whoever wrote it
        model.load_weights(f"{sys.argv[1]}/{flavour}/model.weights.h5")
        x, y = (np.array(values) for values in json.load(open(f"{sys.argv[1]}/data.json")))
        model.fit(x, y, batch_size=len(x), epochs=1, verbose=0)
        found[f"{flavour}/{name}"] = [
            [int(np.asarray(model.optimizer.iterations))],
            *[np.asarray(one).ravel().tolist() for one in model.get_weights()],
        ]
assert "horovod" not in sys.modules
print(json.dumps(found))
"""


def adam() -> Any:
    return K.optimizers.Adam(0.0625, beta_1=0.75)


def trained(opt: Any, rows: Any = small.own) -> Any:
    model = small.model()
    model.compile(optimizer=opt, loss=K.losses.MeanSquaredError())
    x, y = (rows(values) for values in small.data("dense", BATCHES))
    model.fit(x, y, batch_size=len(x) // BATCHES, epochs=1, shuffle=False, verbose=0)
    return model


def train_on(model: Any, x: Any, y: Any) -> np.ndarray[Any, Any]:
    model.fit(x, y, batch_size=len(x), epochs=1, shuffle=False, verbose=0)
    return small.weights(model)


def save(folder: str) -> tuple[list[float], int]:
    """Saves on rank 0; gives the weights after one more batch, the same on all ranks."""
    model = trained(hvd.DistributedOptimizer(adam()))
    if hvd.rank() == 0:
        for name in FORMATS:
            path = f"{folder}/{name}"
            (model.save_weights if "weights" in name else model.save)(path)
    hvd.allreduce(0.0)  # the files are there
    return train_on(model, *batch()).tolist(), small.iterations(model.optimizer)


@pytest.mark.flavour("keras3")
@pytest.mark.timeout(300)
def test_files_open_where_there_is_no_horovod(worlds: Any, tmp_path: Path) -> None:
    script = tmp_path / "elsewhere.py"
    script.write_text(ELSEWHERE)
    ours = {}
    for flavour in ("keras3", "tf_keras"):
        (tmp_path / flavour).mkdir()
        arguments = {"folder": str(tmp_path / flavour)}
        ours[flavour] = worlds.run(2, __file__, "save", arguments, flavour=flavour)[0]
    (tmp_path / "data.json").write_text(json.dumps([values.tolist() for values in batch()]))
    done = subprocess.run(
        [sys.executable, script, tmp_path],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    for name, (iterations, *weights) in json.loads(done.stdout.splitlines()[-1]).items():
        expected, count = ours[name.split("/")[0]]
        assert iterations == [count], name
        small.equal(np.concatenate(weights), expected, 1e-6)


def batch() -> Any:
    """The same on every rank."""
    draw = np.random.default_rng(5)
    return draw.normal(size=(ROWS, 3)), draw.normal(size=(ROWS, 1))


class Ours(K.optimizers.SGD):
    """A user's class."""


def kinds() -> dict[str, Callable[[], Any]]:
    """Optimizers to save, by name."""
    made: dict[str, Callable[[], Any]] = {
        "adam": adam,
        "ours": lambda: Ours(0.0625, momentum=0.5),
        "scaled": lambda: K.mixed_precision.LossScaleOptimizer(adam(), initial_scale=8.0),
        "schedule": lambda: K.optimizers.SGD(K.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
    }
    if not KERAS3:
        made["legacy"] = lambda: K.optimizers.legacy.Adam(0.0625)
    return made


@pytest.mark.np(2)
@pytest.mark.parametrize("name", ["model.keras", "model.h5"])
@pytest.mark.parametrize("kind", ["adam", "ours", "scaled", "schedule", "legacy"])
@pytest.mark.parametrize("wrapped", [True, False])
def test_load_model_goes_on_where_it_was(name: str, kind: str, wrapped: bool) -> None:
    no_state = [("legacy", "model.keras"), ("scaled", "model.h5")]  # in such files of Keras itself
    if kind not in kinds() or (kind, name) in no_state or not (wrapped or kind == "adam"):
        return
    opt = kinds()[kind]()
    model = trained(hvd.DistributedOptimizer(opt)) if wrapped else trained(opt, small.joined)
    folder = folder_of_all()
    path = f"{folder}/{name}"
    if hvd.rank() == 0:
        model.save(path)
    hvd.allreduce(0.0)
    loaded = hvd.load_model(path, custom_optimizers=[Ours], compression=hvd.Compression.none)
    assert "horovod._keras" in str(type(loaded.optimizer))
    assert type(loaded.optimizer).__name__ == type(opt).__name__
    if not wrapped:
        hvd.DistributedOptimizer(opt)
    assert small.iterations(loaded.optimizer) == small.iterations(model.optimizer) == BATCHES
    small.equal(small.weights(loaded), small.weights(model))
    small.equal(*(small.weights(list(one.optimizer.variables)) for one in (loaded, model)), 1e-6)
    x, y = (small.own(values) for values in small.data("dense", 1))
    small.equal(train_on(loaded, x, y), train_on(model, x, y), 1e-6)
    small.same_everywhere(small.weights(loaded))


def folder_of_all() -> str:
    """A folder that all ranks know."""
    made = tempfile.mkdtemp() if hvd.rank() == 0 else None
    return str(hvd_tf.broadcast_object(made))


@pytest.mark.np(2)
def test_a_model_loaded_on_one_rank_is_broadcast() -> None:
    path = f"{folder_of_all()}/model.keras"
    opt = hvd.DistributedOptimizer(adam())
    if hvd.rank() == 0:
        small.model().save(path)
    model = K.models.load_model(path) if hvd.rank() == 0 else small.model()
    if hvd.rank() != 0:
        model.set_weights([one * 0 for one in model.get_weights()])
    model.compile(optimizer=opt, loss=K.losses.MeanSquaredError())
    x, y = (small.own(values) for values in small.data("dense", BATCHES))
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(x, y, batch_size=ROWS, epochs=1, shuffle=False, verbose=0, callbacks=[broadcast])
    small.same_everywhere(small.weights(model))
    small.same_everywhere(small.weights(list(opt.variables)))


@pytest.mark.np(2)
def test_a_model_that_was_not_compiled_stays_so() -> None:
    path = f"{folder_of_all()}/model.keras"
    if hvd.rank() == 0:
        small.model().save(path)
    hvd.allreduce(0.0)
    small.equal(small.weights(hvd.load_model(path)), small.weights(small.model()))
