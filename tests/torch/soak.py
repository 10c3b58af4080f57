"""Seeded random collectives for a while, each result checked; run under the launcher, any np >= 2.

    horovodrun -np 4 python tests/torch/soak.py --minutes 10 [--seed N]

Every rank plans every round from the seed alone, so it knows what each rank puts in and what must
come out. It fails by an exception that names seed, round and call, by a watchdog with the stacks
of all threads, or by memory that grew by 16 MiB from minute 2 to the end.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
import os
import random
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import horovod.torch as hvd
from horovod.common.exceptions import HorovodInternalError

HANG_S = 90.0
MOST_GROWTH_BYTES = 16 << 20
SETTLED_S = 120.0
MOST_BYTES = 4 << 20
FAULTS = 0.01

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
DTYPES = [*INTEGERS, *FLOATS, torch.bool, torch.complex64]
KINDS = ["allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier"]
GROUPED = {"allreduce", "allgather", "reducescatter"}
IN_PLACE = {"allreduce", "broadcast"}
FOLDS: dict[int, Callable[..., torch.Tensor]] = {
    hvd.Sum: torch.add,
    hvd.Average: torch.add,
    hvd.Min: torch.minimum,
    hvd.Max: torch.maximum,
    hvd.Product: torch.mul,
}


@dataclass
class Plan:
    """One call, as all its members know it."""

    kind: str
    process_set: Any
    members: list[int]
    name: str | None
    dtype: torch.dtype
    op: int
    root: int
    shapes: list[dict[int, tuple[int, ...]]]  # of each tensor, by rank
    offset: int
    grouped: bool
    in_place: bool
    splits: dict[int, list[int]] = field(default_factory=dict)  # by rank
    fault: str = ""
    culprit: int = -1


class Values:
    """What goes in and what must come out."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        count = MOST_BYTES + 100_000
        self.table = torch.randint(-3, 4, (count,), generator=generator, dtype=torch.int8)

    def term(self, plan: Plan, rank: int, tensor: int) -> torch.Tensor:
        """Small whole numbers: their sums and products are exact in every type."""
        shape = plan.shapes[tensor][rank]
        count = torch.Size(shape).numel()
        start = plan.offset + 7919 * rank + 104_729 * tensor
        start %= self.table.numel() - count
        values = self.table[start : start + count].reshape(shape)
        if plan.dtype is torch.bool:
            return values > 0
        if plan.op == hvd.Product and plan.kind == "allreduce":
            values = values.abs() % 2 + 1
        elif plan.dtype is torch.uint8:
            values = values.abs()
        return values.to(plan.dtype)

    def results(self, plan: Plan, rank: int, contributors: Sequence[int]) -> list[torch.Tensor]:
        return [self._result(plan, rank, i, contributors) for i in range(len(plan.shapes))]

    def _result(
        self, plan: Plan, rank: int, tensor: int, contributors: Sequence[int]
    ) -> torch.Tensor:
        if plan.kind == "broadcast":
            return self.term(plan, plan.root, tensor)
        terms = {other: self.term(plan, other, tensor) for other in contributors}
        if plan.kind == "allgather":
            return torch.cat(list(terms.values()))
        me = plan.members.index(rank)
        if plan.kind == "alltoall":
            return torch.cat([terms[other].split(plan.splits[other])[me] for other in plan.members])
        wide = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
        first, *rest = terms.values()
        total = first.to(wide.get(plan.dtype, plan.dtype))
        for term in rest:
            total = FOLDS[plan.op](total, term.to(total.dtype))
        if plan.op == hvd.Average:
            total = total / len(plan.members)
        total = total.to(plan.dtype)
        if plan.kind == "reducescatter":
            rows, size = total.shape[0], len(plan.members)
            total = total.split([rows // size + (i < rows % size) for i in range(size)])[me]
        return total


class Planner:
    """Makes the rounds: a function of the seed, the number of the round and the sets there are."""

    def __init__(self, seed: int, size: int) -> None:
        self.seed, self.size = seed, size

    def dice(self, round_number: int) -> random.Random:
        return random.Random(f"{self.seed}/{round_number}")

    def call(self, dice: random.Random, sets: Sequence[Any], name: str | None) -> Plan:
        process_set = dice.choice(sets)
        members = list(process_set.ranks)
        kind = dice.choice(KINDS)
        dtype = dice.choice(DTYPES)
        plan = Plan(
            kind,
            process_set,
            members,
            name,
            dtype,
            self._op(dice, kind, dtype),
            dice.choice(members),
            [],
            dice.randrange(MOST_BYTES),
            kind in GROUPED and dice.random() < 0.3,
            kind in IN_PLACE and dice.random() < 0.4,
        )
        if kind == "barrier":
            return plan
        for _ in range(dice.randint(1, 4) if plan.grouped else 1):
            plan.shapes.append(self._shapes(dice, plan))
        if kind == "alltoall":
            for rank in members:
                rows, cuts = plan.shapes[0][rank][0], []
                cuts = sorted(dice.randint(0, rows) for _ in members[1:])
                plan.splits[rank] = [b - a for a, b in zip([0, *cuts], [*cuts, rows], strict=True)]
        if len(members) > 1 and dice.random() < FAULTS:
            self._spoil(dice, plan)
        return plan

    def _op(self, dice: random.Random, kind: str, dtype: torch.dtype) -> int:
        if kind not in ("allreduce", "reducescatter"):
            return int(hvd.Sum)
        if dtype is torch.bool:
            ops = [hvd.Min, hvd.Max] if kind == "allreduce" else [hvd.Sum]
        elif dtype is torch.complex64:
            ops = [hvd.Sum]
        else:
            ops = [hvd.Sum, hvd.Min, hvd.Max, hvd.Product] if kind == "allreduce" else [hvd.Sum]
            if dtype.is_floating_point:
                ops.append(hvd.Average)
        return int(dice.choice(ops))

    def _shapes(self, dice: random.Random, plan: Plan) -> dict[int, tuple[int, ...]]:
        largest = MOST_BYTES // plan.dtype.itemsize // (4 if plan.grouped else 1)
        count = int(2 ** dice.uniform(0, largest.bit_length() - 1)) if dice.random() < 0.9 else 0
        if plan.kind in ("allreduce", "broadcast"):
            shape = (count,) if dice.random() < 0.5 else (max(1, count // 6), 2, 3)
            return dict.fromkeys(plan.members, () if dice.random() < 0.05 else shape)
        columns = dice.choice([(), (1,), (3, 2), (0,)])
        rows = count // 8
        if plan.kind == "reducescatter":
            return dict.fromkeys(plan.members, (rows, *columns))
        return {rank: (dice.randint(0, rows), *columns) for rank in plan.members}

    def _spoil(self, dice: random.Random, plan: Plan) -> None:
        """One rank makes the call differently."""
        faults = ["dtype", "trailing"]
        if plan.kind == "broadcast":
            faults += ["other root", "no such root"]
        if plan.kind == "alltoall":
            faults += ["splits", "splits"]
        if plan.kind in ("allreduce", "reducescatter"):
            faults.append("op")
        plan.fault, plan.culprit = dice.choice(faults), dice.choice(plan.members)


def submit(plan: Plan, me: int, values: Values) -> tuple[Any, list[torch.Tensor]]:
    """A handle, and what goes in."""
    tensors = [values.term(plan, me, i).clone() for i in range(len(plan.shapes))]
    root, op, splits = plan.root, plan.op, plan.splits.get(me)
    if me == plan.culprit:
        if plan.fault == "dtype":
            other = torch.int32 if plan.dtype is not torch.int32 else torch.int64
            tensors = [tensor.real.to(other) for tensor in tensors]
        elif plan.fault == "trailing":
            tensors = [torch.zeros((*tensor.shape, 5), dtype=plan.dtype) for tensor in tensors]
        elif plan.fault == "other root":
            root = next(rank for rank in plan.members if rank != root)
        elif plan.fault == "no such root":
            root = 1 << 20
        elif plan.fault == "splits":
            splits = [*(splits or ()), 1]
        elif plan.fault == "op":
            op = int(hvd.Max if plan.op != hvd.Max else hvd.Min)
    words: dict[str, Any] = {"name": plan.name, "process_set": plan.process_set}
    if plan.kind in ("allreduce", "reducescatter"):
        words["op"] = op
    if plan.kind == "broadcast":
        words["root_rank"] = root
    if plan.kind == "alltoall":
        words["splits"] = torch.tensor(splits, dtype=torch.int32)
    function = ("grouped_" if plan.grouped else "") + plan.kind + "_async"
    call = getattr(hvd, function + ("_" if plan.in_place else ""))
    return call(tensors if plan.grouped else tensors[0], **words), tensors


class Soak:
    def __init__(self, seed: int) -> None:
        self.seed, self.me, self.size = seed, hvd.rank(), hvd.size()
        self.values, self.planner = Values(seed), Planner(seed, self.size)
        self.sets: list[Any] = []
        self.counts = {"calls": 0, "errors": 0, "joins": 0, "sets": 0}

    def round(self, number: int) -> None:
        dice = self.planner.dice(number)
        what = dice.random()
        if what < 0.08:
            self.join(dice)
        elif what < 0.16:
            self.change_sets(dice)
        else:
            self.batch(dice, at_once=what < 0.8)

    def batch(self, dice: random.Random, at_once: bool) -> None:
        """Many calls in flight, in an order of its own on every rank; or one after the other."""
        sets = [hvd.global_process_set, *self.sets]
        plans = []
        for i in range(dice.randint(1, 40 if at_once else 8)):
            unnamed = dice.random() < 0.2
            plans.append(
                self.planner.call(dice, sets, None if unnamed else f"k {i} ü{dice.randrange(20)}")
            )
        plans = [plan for plan in plans if self.me in plan.members]
        own = random.Random(f"{dice.random()}/{self.me}")
        barriers = [each for each in sets if dice.random() < 0.2 and self.me in each.ranks]
        if not at_once:
            for plan in plans:
                self.finish(plan, *self.begin(plan))
            return
        self.shuffle_named(own, plans)
        open_calls = [(plan, *self.begin(plan)) for plan in plans if plan.kind != "barrier"]
        for process_set in barriers:  # in the same order on every rank
            hvd.barrier(process_set=process_set)
        own.shuffle(open_calls)
        for open_call in open_calls:
            self.finish(*open_call)

    @staticmethod
    def shuffle_named(own: random.Random, plans: list[Plan]) -> None:
        """Calls without a name match by their order, so they keep it."""
        unnamed = [plan for plan in plans if plan.name is None]
        own.shuffle(plans)
        rest = iter(unnamed)
        plans[:] = [plan if plan.name is not None else next(rest) for plan in plans]

    def begin(self, plan: Plan) -> tuple[Any, Any, list[torch.Tensor]]:
        """A handle or None, the error that submitting raised, and what went in."""
        self.counts["calls"] += 1
        if plan.kind == "barrier":
            hvd.barrier(process_set=plan.process_set)
            return None, None, []
        try:
            handle, tensors = submit(plan, self.me, self.values)
        except (ValueError, HorovodInternalError) as error:
            if plan.culprit != self.me:
                raise
            return None, error, []
        return handle, None, tensors

    def finish(
        self,
        plan: Plan,
        handle: Any,
        error: Exception | None,
        tensors: list[torch.Tensor],
        contributors: Sequence[int] | None = None,
    ) -> None:
        if plan.kind == "barrier":
            return
        result: Any = None
        if error is None:
            hvd.poll(handle)
            try:
                result = hvd.synchronize(handle)
            except HorovodInternalError as raised:
                error = raised
        if plan.fault:
            self.counts["errors"] += 1
            assert error is not None, f"nobody noticed: {plan}"
            return
        if error is not None:
            raise error
        wanted = self.values.results(plan, self.me, contributors or plan.members)
        if plan.kind == "alltoall":
            result, received = result
            place = plan.members.index(self.me)
            assert received.tolist() == [plan.splits[rank][place] for rank in plan.members]
        results = list(result) if plan.grouped else [result]
        for got, want, tensor in zip(results, wanted, tensors, strict=True):
            assert got.dtype == want.dtype and got.shape == want.shape, (plan, got.shape)
            assert (got is tensor) == plan.in_place, plan
            if plan.op == hvd.Average:
                torch.testing.assert_close(got, want)
            else:
                assert torch.equal(got, want), plan

    def join(self, dice: random.Random) -> None:
        """The ranks run out of data after different numbers of allreduces."""
        self.counts["joins"] += 1
        steps = [dice.randint(0, 6) for _ in range(self.size)]
        plans = []
        while len(plans) < max(steps):
            plan = self.planner.call(dice, [hvd.global_process_set], f"step {len(plans)}")
            if plan.kind == "allreduce" and not plan.fault:
                plans.append(plan)
        open_calls = [(plan, *self.begin(plan)) for plan in plans[: steps[self.me]]]
        last = hvd.join()
        for i, open_call in enumerate(open_calls):
            going = [rank for rank in range(self.size) if steps[rank] > i]
            self.finish(*open_call, contributors=going)
        everyones = hvd.allgather(torch.tensor([last]), name="last").tolist()
        assert everyones == [everyones[0]] * self.size and 0 <= last < self.size, everyones

    def change_sets(self, dice: random.Random) -> None:
        self.counts["sets"] += 1
        if len(self.sets) > 6 or (len(self.sets) > 3 and dice.random() < 0.5):
            assert hvd.remove_process_set(self.sets.pop(dice.randrange(len(self.sets))))
            return
        ranks = sorted(dice.sample(range(self.size), dice.randint(1, self.size - 1)))
        if all(ranks != known.ranks for known in self.sets):
            added = hvd.add_process_set(ranks)
            self.sets.append(added)
            ids = hvd.allgather(torch.tensor([added.process_set_id]), name="id").tolist()
            assert ids == [ids[0]] * self.size, ids


def rss_bytes() -> int:
    """What is used, without what the C library keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)

    size = int(os.environ.get("HOROVOD_SIZE", "1"))
    static = [ranks for ranks in ([0, 1], [2, 3], [0, 2, 3]) if max(ranks) < size > len(ranks)]
    sets = [hvd.ProcessSet(ranks) for ranks in static]
    hvd.init(process_sets=sets)
    seed = options.seed if options.seed is not None else secrets.randbelow(1 << 31)
    seed = int(hvd.broadcast(torch.tensor([seed]), 0, name="seed"))
    if hvd.rank() == 0:
        print(f"seed {seed}, {hvd.size()} ranks, {options.minutes} minutes", flush=True)
    soak = Soak(seed)
    soak.sets = sets
    start = time.monotonic()
    settled: int | None = None
    number = 0
    going = True
    while going:
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        try:
            soak.round(number)
        except Exception as error:
            error.args = (f"seed {seed}, round {number}: {error}",)
            raise
        number += 1
        now = time.monotonic() - start
        if settled is None and number % 10 == 0 and now >= SETTLED_S:
            settled = rss_bytes()
            print(f"rank {hvd.rank()}: {settled >> 10} KiB at minute 2", flush=True)
        more = torch.tensor([now < options.minutes * 60])
        going = bool(hvd.broadcast(more, 0, name="going"))
    faulthandler.cancel_dump_traceback_later()
    last = rss_bytes()
    print(f"rank {hvd.rank()}: {last >> 10} KiB at the end", flush=True)
    if settled is not None:
        assert last - settled < MOST_GROWTH_BYTES, f"memory grew by {last - settled} bytes"
    hvd.barrier()
    if hvd.rank() == 0:
        counts = ", ".join(f"{count} {what}" for what, count in soak.counts.items())
        print(f"sound: {number} rounds, {counts}", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
