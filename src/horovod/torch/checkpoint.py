"""Snapshots of training, one file a rank, and the newest that all ranks have; knows no model."""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import pickle
import re
import struct
import time
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from horovod.common import objects, ops
from horovod.common.exceptions import MismatchError
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch.gather import gather_plain

_NAME = re.compile(r"step-(\d+)\.run-([0-9a-f]+)\.rank-(\d+)-of-(\d+)\.pt(\.partial)?")
_DAMAGED = (
    *(OSError, EOFError, ValueError, RuntimeError),
    *(zipfile.BadZipFile, struct.error, zlib.error),
)
_log = logging.getLogger("horovod")


class _Snapshot(NamedTuple):
    """What the files of one `save` have in common; the newest is the greatest."""

    step: int
    run: str
    """Tells apart equal steps of two attempts, of which one was given up; the later is greater."""
    members: int

    def file(self, rank: int) -> str:
        return f"step-{self.step}.run-{self.run}.rank-{rank}-of-{self.members}.pt"


class Checkpointer:
    """Saves and resumes training from files that may be damaged, missing or half-written.

    Each rank writes its own snapshot, in a directory of its host or one that all share. A job that
    was killed at any moment resumes from the newest step that every rank has whole::

        checkpointer = hvd.Checkpointer("snapshots")
        resumed = checkpointer.resume()
        if resumed is not None:
            step, state = resumed
            model.load_state_dict(state["model"])
        ...
        checkpointer.save(step, {"model": model.state_dict(), ...})

    Snapshots are ordinary files of `torch.save`. One is whole if the checksums in it are right, and
    older ones are removed only when all ranks have a newer one whole. A new run needs an empty
    directory, or begins with `resume`.

    Args:
        directory: made if it isn't there. For one checkpointer alone.
        keep: how many complete snapshots stay, at least 1.
        process_set: who saves and resumes together.
        weights_only: only states of tensors and plain Python values are saved and loaded, as with
            `torch.load`. False lets snapshots hold any object, and loading one runs whatever code
            it names: for directories that nobody else can write to.

    Raises:
        ValueError: `keep` is less than 1.

    Source: the idea of ChainerMN's multi-node checkpointer.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: int = 2,
        process_set: ProcessSet = global_process_set,
        *,
        weights_only: bool = True,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, not {keep}")
        self._directory = Path(directory)
        self._keep = keep
        self._set = process_set
        self._weights_only = weights_only
        self._run: str | None = None
        self._complete: list[_Snapshot] = []  # oldest first

    def save(self, step: int, state: Any) -> None:
        """Writes this rank's snapshot, and removes old ones once all ranks have written theirs.

        Blocks until every member has called it and its file is on the disk.

        Args:
            step: 0 or more, the same on all members. A later one counts as newer.
            state: what `resume` shall give this rank.

        Raises:
            MismatchError: on every member: the steps differ.
            ValueError: the step is negative; the others get a HorovodInternalError.
            HorovodInternalError: on every member: one could not write, or its state holds objects
                that `weights_only` would not load. Older snapshots stay.
        """
        started = gather_plain("checkpoint.save", lambda: self._announce(step), self._set)
        if any(other[0] != started[0][0] for other in started):
            submitted = ", ".join(
                f"rank {rank}: {other[0]}"
                for rank, other in zip(ops.ranks(self._set), started, strict=True)
            )
            raise MismatchError(f"checkpoint: the steps differ: {submitted}", submitted=submitted)
        number, run = started[0]  # not `step`: that may be of a type that prints otherwise
        self._run = run
        snapshot = _Snapshot(number, run, ops.members(self._set))
        error = self._write(self._directory / snapshot.file(ops.index(self._set)), state)
        objects.agree("checkpoint.save", "write its snapshot", error, self._set)
        self._complete = [one for one in self._complete if one != snapshot] + [snapshot]
        del self._complete[: -self._keep]
        self._prune(snapshot)

    def resume(self, resize: bool = False) -> tuple[int, Any] | None:
        """The newest step that every member has whole, and this member's state of it.

        Blocks until every member has called it.

        Args:
            resize: also accepts snapshots of another number of members: rank r then gets the state
                of old rank ``r % old size``. Right for what is equal on all ranks, such as models
                and optimizers.

        Returns:
            The step, and the state with its tensors on the CPU; None if there is no such step.

        Raises:
            ValueError: on every member: the newest snapshot is of another number of members, and
                `resize` is False.
            HorovodInternalError: on every member: one can't read its directory, or can't load a
                whole snapshot because of `weights_only` or of a class that isn't there any more.
        """
        members, own = ops.members(self._set), ops.index(self._set)
        theirs = gather_plain("checkpoint.resume", lambda: self._found(own), self._set)
        common = set.intersection(*({_Snapshot(*one) for one in found} for found in theirs))
        for rank, found in zip(ops.ranks(self._set), theirs, strict=True):
            if not common and found:
                _log.warning("rank %d has snapshots, but no step is on all ranks", rank)
        for snapshot in sorted(common, reverse=True):
            if snapshot.members != members and not resize:
                raise ValueError(
                    f"the newest snapshot, of step {snapshot.step}, is of {snapshot.members} ranks "
                    f"and not of {members}: resume(resize=True) gives rank r the state of rank "
                    f"r % {snapshot.members}"
                )
            path = self._directory / snapshot.file(own % snapshot.members)
            whole = gather_plain("checkpoint.whole", lambda: _is_whole(path), self._set)  # noqa: B023
            if all(whole):
                state = self._load(path)
                self._complete = [snapshot]
                return snapshot.step, state
        return None

    def _announce(self, step: int) -> list[Any]:
        if operator.index(step) < 0:
            raise ValueError(f"a step is 0 or more, not {step}")
        return [operator.index(step), self._run or f"{time.time_ns():016x}"]

    def _write(self, path: Path, state: Any) -> Exception | None:
        """Puts the whole file in its place at once, on the disk; gives the error instead."""
        partial = path.with_name(f"{path.name}.partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(partial, "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            if self._weights_only:  # what couldn't be resumed isn't saved; reads no tensors
                torch.load(partial, map_location="cpu", mmap=True, weights_only=True)
            os.replace(partial, path)
            directory = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        except Exception as error:  # pickling a state may raise anything
            with contextlib.suppress(OSError):  # the others wait to be told of the first error
                partial.unlink()
            return error
        return None

    def _load(self, path: Path) -> Any:
        state, failure = None, None
        try:
            state = torch.load(path, map_location="cpu", weights_only=self._weights_only)
        except Exception as error:  # unpickling may raise anything
            failure = error
        objects.agree("checkpoint.resume", f"load {path}", failure, self._set)
        return state

    def _files(self) -> Iterator[tuple[Path, _Snapshot, int, bool]]:
        """Each file, what it belongs to, the rank that wrote it, and whether it got its place."""
        if not self._directory.exists():
            return
        for path in self._directory.iterdir():
            if match := _NAME.fullmatch(path.name):
                step, run, rank, members, partial = match.groups()
                yield path, _Snapshot(int(step), run, int(members)), int(rank), not partial

    def _found(self, own: int) -> list[_Snapshot]:
        return [
            snapshot
            for _, snapshot, rank, placed in self._files()
            if placed and rank == own % snapshot.members
        ]

    def _prune(self, newest: _Snapshot) -> None:
        """Removes what is older than the newest and not kept; in a shared directory, its share."""
        for path, snapshot, rank, _ in list(self._files()):
            mine = rank % ops.members(self._set) == ops.index(self._set)
            if mine and snapshot <= newest and snapshot not in self._complete:
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:  # no reason to end the training
                    _log.warning("an old snapshot stays: %s", error)


def _is_whole(path: Path) -> bool:
    """Whether the checksums in the file, a ZIP archive, are right, and torch can read it."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is None:
            with contextlib.suppress(pickle.UnpicklingError):  # loading judges what it may hold
                torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except _DAMAGED as error:
        damaged = str(error)
    if damaged is not None:
        _log.warning("snapshot %s is damaged: %s", path, damaged)
    return damaged is None
