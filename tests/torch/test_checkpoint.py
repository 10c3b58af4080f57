"""A checkpointer resumes from the newest step that every rank has whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import horovod.torch as hvd
from horovod.common.exceptions import MismatchError

RunIn = Callable[..., list[Any]]


def state_of(step: int) -> dict[str, Any]:
    return {"rank": hvd.rank(), "weights": torch.full((1000,), float(step)), "text": ["a", None]}


def save(directory: Path, steps: list[int], keep: int = 2) -> None:
    checkpointer = hvd.Checkpointer(directory, keep)
    for step in steps:
        checkpointer.save(step, state_of(step))


def resume(directory: Path, **options: Any) -> Any:
    """The step, and the rank whose state this is."""
    resumed = hvd.Checkpointer(directory).resume(**options)
    if resumed is None:
        return None
    step, state = resumed
    assert torch.equal(state["weights"], torch.full((1000,), float(step)))
    return step, state["rank"]


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def file(directory: Path, step: int, rank: int) -> Path:
    (path,) = directory.glob(f"step-{step}.run-*.rank-{rank}-of-*.pt")
    return path


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_newest_comes_back_and_old_ones_go(size: int, run_in: RunIn, tmp_path: Path) -> None:
    directory = tmp_path / "deep" / "snapshots"
    assert run_in(size, resume, directory=directory) == [None] * size
    run_in(size, save, directory=directory, steps=[0, 3, 10, 20])
    assert run_in(size, resume, directory=directory) == [(20, rank) for rank in range(size)]
    kept = [(10, rank) for rank in range(size)] + [(20, rank) for rank in range(size)]
    assert files(directory) == sorted(file(directory, *one).name for one in kept)
    assert torch.load(file(directory, 20, 0))["text"] == ["a", None]  # an ordinary file


def missing(path: Path) -> None:
    path.unlink()


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def never_placed(path: Path) -> None:
    path.rename(f"{path}.partial")


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    at = data.index(torch.full((8,), 20.0).numpy().tobytes())
    data[at] ^= 1
    path.write_bytes(data)


def mislabelled(path: Path) -> None:
    """Harms the list of contents, which has no checksum."""
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\1\2") + 21] ^= 255  # a length
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [missing, truncated, empty, never_placed, flipped, mislabelled])
def test_one_damaged_file_takes_all_to_the_step_before(
    damage: Callable[[Path], None], run_in: RunIn, tmp_path: Path
) -> None:
    run_in(2, save, directory=tmp_path, steps=[10, 20])
    damage(file(tmp_path, 20, 1))
    assert run_in(2, resume, directory=tmp_path) == [(10, 0), (10, 1)]
    damage(file(tmp_path, 10, 0)) if damage is not flipped else missing(file(tmp_path, 10, 0))
    assert run_in(2, resume, directory=tmp_path) == [None, None]


def test_equal_steps_of_two_attempts_are_not_mixed(run_in: RunIn, tmp_path: Path) -> None:
    """Rank 1 lost its step 20; the next attempt was killed before rank 0 had written it."""
    run_in(2, save, directory=tmp_path, steps=[10, 20])
    missing(file(tmp_path, 20, 1))
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    run_in(2, save, directory=tmp_path, steps=[20])
    missing(file(tmp_path, 20, 0))
    for path, data in before.items():
        path.write_bytes(data)
    assert len({file(tmp_path, 20, rank).name.split(".")[1] for rank in (0, 1)}) == 2
    assert run_in(2, resume, directory=tmp_path) == [(10, 0), (10, 1)]


def resume_and_save(directory: Path, step: int) -> None:
    checkpointer = hvd.Checkpointer(directory, keep=1)
    assert checkpointer.resume() is not None
    checkpointer.save(step, state_of(step))


def test_what_an_attempt_left_goes_with_time(run_in: RunIn, tmp_path: Path) -> None:
    run_in(2, save, directory=tmp_path, steps=[10, 20])
    missing(file(tmp_path, 20, 1))
    never_placed(file(tmp_path, 20, 0))
    run_in(2, resume_and_save, directory=tmp_path, step=30)
    assert len(files(tmp_path)) == 2
    assert run_in(2, resume, directory=tmp_path) == [(30, 0), (30, 1)]


def resized(directory: Path) -> Any:
    with pytest.raises(ValueError, match="step 20, is of 3 ranks and not of 2"):
        resume(directory)
    return resume(directory, resize=True)


def test_another_number_of_ranks_must_be_asked_for(run_in: RunIn, tmp_path: Path) -> None:
    run_in(2, save, directory=tmp_path, steps=[10])
    run_in(3, save, directory=tmp_path, steps=[20])
    assert run_in(2, resized, directory=tmp_path) == [(20, 0), (20, 1)]
    run_in(2, save, directory=tmp_path, steps=[30])
    assert run_in(3, resume, directory=tmp_path, resize=True) == [(30, 0), (30, 1), (30, 0)]
    assert len(files(tmp_path)) == 2


class Custom:
    pass


def failing(directory: Path) -> None:
    checkpointer = hvd.Checkpointer(directory)
    checkpointer.save(1, state_of(1))
    before = files(directory)
    hvd.barrier()
    bad: Any = Custom() if hvd.rank() == 1 else 0
    with pytest.raises(hvd.HorovodInternalError, match=r"rank 1 could not write(.|\n)*Custom"):
        checkpointer.save(2, bad)
    bad = (lambda: 0) if hvd.rank() == 0 else 0
    with pytest.raises(hvd.HorovodInternalError, match="rank 0 could not write"):
        checkpointer.save(2, bad)
    with pytest.raises(MismatchError, match="rank 0: 5, rank 1: 6"):
        checkpointer.save(5 + hvd.rank(), 0)
    error = ValueError if hvd.rank() else hvd.HorovodInternalError
    with pytest.raises(error, match="0 or more"):
        checkpointer.save(-1 if hvd.rank() else 1, 0)
    assert set(before) <= set(files(directory))
    assert not list(directory.glob("*.partial"))
    assert checkpointer.resume() is not None
    with pytest.raises(ValueError, match="keep"):
        hvd.Checkpointer(directory, keep=0)
    elsewhere = directory / "a file" if hvd.rank() else directory
    (directory / "a file").touch()
    with pytest.raises(hvd.HorovodInternalError, match="rank 1 could not write"):
        hvd.Checkpointer(elsewhere).save(2, 0)


def test_a_failure_on_one_rank_is_raised_on_all(run_in: RunIn, tmp_path: Path) -> None:
    run_in(2, failing, directory=tmp_path)


def any_object(directory: Path) -> None:
    trusting = hvd.Checkpointer(directory, weights_only=False)
    trusting.save(1, Custom() if hvd.rank() else 0)
    with pytest.raises(hvd.HorovodInternalError, match=r"rank 1 could not load(.|\n)*[Ww]eights"):
        hvd.Checkpointer(directory).resume()
    resumed = trusting.resume()
    assert resumed is not None
    assert type(resumed[1]) is (Custom if hvd.rank() else int)


def test_any_object_only_if_asked_for(run_in: RunIn, tmp_path: Path) -> None:
    run_in(2, any_object, directory=tmp_path)


def training(directory: Path, until: int) -> list[float]:
    """AdamW over a world, saved each step; gives the weights."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1).double()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.1), model.named_parameters()
    )
    checkpointer, first = hvd.Checkpointer(directory), 0
    if (resumed := checkpointer.resume()) is not None:
        first, state = resumed
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for step in range(first, until):
        optimizer.zero_grad()
        model(torch.full((2, 4), float(step + hvd.rank())).double()).square().sum().backward()
        optimizer.step()
        checkpointer.save(
            step + 1, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        )
    return [float(value) for value in model.weight.flatten()]


def test_resumed_training_goes_on_as_if_never_stopped(run_in: RunIn, tmp_path: Path) -> None:
    straight = run_in(2, training, directory=tmp_path / "straight", until=4)
    run_in(2, training, directory=tmp_path / "stopped", until=3)
    truncated(file(tmp_path / "stopped", 3, 0))
    assert run_in(2, training, directory=tmp_path / "stopped", until=4) == straight
