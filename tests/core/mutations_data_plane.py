"""Breaks schedules, transport, executor or engine in one place at a time; some test must notice.

Run by hand: python tests/core/mutations_data_plane.py [--only WORD...]. Needs CMake, Ninja,
nanobind and a compiler. Works on a copy; prints a table and exits 1 if a mutation survives. Knows
the sources as text only.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COPIED = ["CMakeLists.txt", "core", "src", "tests", "pyproject.toml"]
CONFORMANCE = "tests/core/test_conformance.py"
LONGEST_BUILD_S = 900
LONGEST_RUN_S = 100


@dataclass(frozen=True)
class Mutation:
    """One changed place, and the test that is expected to notice it."""

    what: str
    file: str
    old: str
    new: str
    test: str


def python(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments]


TESTS = {  # name: what to build and what to run
    "schedules": ("schedules_test", ["build/schedules_test"]),
    "mesh": ("mesh_test", ["build/mesh_test"]),
    "shm": ("shm_test", ["build/shm_test"]),
    "ranks": ("ranks_test", ["build/ranks_test"]),
    "inline": ("inline_test", ["build/inline_test"]),
    "conformance": ("_core", python(CONFORMANCE, "-k", "tiny and (2 or 3)")),
    "engine": ("_core", python("tests/core/test_engine.py")),
    "ends": ("_core", python("tests/core/test_engine_ends.py", "-k", "plan")),
}

MUTATIONS = [
    # The three that the project promises to notice end to end.
    Mutation(
        "a segment is dropped",
        "algorithms.cc",
        "const uint64_t segments = segments_of(bytes, place.segment_bytes);",
        "const uint64_t segments = segments_of(bytes, place.segment_bytes) - (bytes > 2000);",
        "conformance",
    ),
    Mutation(
        "Sum becomes Max",
        "collective.cc",
        ".op = average ? ReduceOp::Sum : call.op",
        ".op = call.op == ReduceOp::Sum ? ReduceOp::Max : average ? ReduceOp::Sum : call.op",
        "conformance",
    ),
    Mutation(
        "one rank's last element is skipped",
        "mesh.cc",
        "bytes / info(dtype).size);",
        "bytes / info(dtype).size - (!terms_.empty() && slots_[0] != nullptr && bytes > 64));",
        "conformance",
    ),
    # Terms that come with their entry.
    Mutation(
        "every tensor of a group folds the first one's terms",
        "collective.cc",
        "for (const std::byte*& term : next) term += bytes;",
        "",
        "inline",
    ),
    Mutation(
        "Average divides by the contributors",
        "collective.cc",
        "FoldSpec spec = fold_of(*call, members);",
        "FoldSpec spec = fold_of(*call, contributors);",
        "inline",
    ),
    Mutation(
        "Adasum is folded",
        "collective.cc",
        "return call.kind == OpKind::Allreduce && call.op != ReduceOp::Adasum;",
        "return call.kind == OpKind::Allreduce;",
        "inline",
    ),
    # Schedules.
    Mutation(
        "a segment is dropped, seen without a network",
        "algorithms.cc",
        "const uint64_t segments = segments_of(bytes, place.segment_bytes);",
        "const uint64_t segments = segments_of(bytes, place.segment_bytes) - (bytes > 2000);",
        "schedules",
    ),
    Mutation(
        "results overwrite inputs before they are sent",
        "algorithms.cc",
        "b.fold(p.begin, p.begin, p.bytes, false, sent);",
        "b.fold(p.begin, p.begin, p.bytes, false, -1);",
        "schedules",
    ),
    Mutation(
        "pieces of a reducescatter fill the outbox",
        "algorithms.cc",
        "place.segment_bytes / kAlignment / static_cast<uint64_t>(place.size);",
        "place.segment_bytes / kAlignment;",
        "schedules",
    ),
    Mutation(
        "the own chunk isn't copied",
        "algorithms.cc",
        "b.copy(own.begin, offsets[place.rank] + own.begin, own.bytes);",
        "",
        "schedules",
    ),
    Mutation(
        "partners don't rotate",
        "algorithms.cc",
        "const int32_t dest = (place.rank + k) % place.size;",
        "const int32_t dest = (place.rank - k + place.size) % place.size;",
        "schedules",
    ),
    # The executor.
    Mutation(
        "terms are folded in another order",
        "mesh.cc",
        "slots_[static_cast<size_t>(peers[i])] = slot;",
        "slots_[static_cast<size_t>(peers[peers.size() - 1 - i])] = slot;",
        "conformance",
    ),
    Mutation(
        "a forward isn't published",
        "mesh.cc",
        "if (forward != nullptr) publish(step, stores);",
        "",
        "ranks",
    ),
    Mutation(
        "a pair's order is broken",
        "mesh.cc",
        "      close_channels(run, step);",
        "      (void)step;",
        "ranks",
    ),
    Mutation(
        "a send overtakes one that found no room",
        "mesh.cc",
        "      send_waits = send_waits || step.sends();",
        "      (void)send_waits;",
        "mesh",
    ),
    Mutation(
        "a slot is never given back",
        "mesh.cc",
        "for (const int32_t rank : ranks) transport_.consume(rank);",
        "",
        "ranks",
    ),
    # The transport.
    Mutation(
        "a slot is written over before it is read",
        "shm.cc",
        "return place(bytes) + bytes - tail_ <= bytes_;",
        "return bytes <= bytes_;",
        "ranks",
    ),
    Mutation(
        "slots run over the end of the outbox",
        "shm.cc",
        "return offset + bytes <= bytes_ ? head_ : head_ + (bytes_ - offset);",
        "return offset <= bytes_ ? head_ : head_ + (bytes_ - offset);",
        "ranks",
    ),
    Mutation(
        "control bytes don't wrap",
        "shm.cc",
        "std::memcpy(channel.control, bytes.data() + first, n - first);",
        "",
        "ranks",
    ),
    Mutation(
        "sleepers aren't woken",
        "shm.cc",
        "      ring(rank);\n",
        "      (void)rank;\n",
        "ranks",
    ),
    Mutation(
        "room that comes between two failures is forgotten",
        "shm.cc",
        "    if (waits_for_room_) return;\n",
        "",
        "shm",
    ),
    # Collectives.
    Mutation(
        "an average divides by those who took part",
        "collective.cc",
        "fold_of(*calls_.front(), group_.members.size())",
        "fold_of(*calls_.front(), group_.contributors.size())",
        "engine",
    ),
    Mutation(
        "prescale is forgotten", "collective.cc", ".prescale = call.prescale,", "", "conformance"
    ),
    Mutation(
        "the longer parts come last",
        "collective.cc",
        "return {base * k + std::min(k, longer), base + (k < longer ? 1 : 0)};",
        "return {base * k + std::max<int64_t>(k - (parts - longer), 0),"
        " base + (k >= parts - longer ? 1 : 0)};",
        "conformance",
    ),
    Mutation(
        "a root is a place in the world",
        "collective.cc",
        "static_cast<int32_t>(index_of(group_.contributors, call.root));",
        "call.root;",
        "ranks",
    ),
    # The engine.
    Mutation(
        "a queued call outlives its engine",
        "engine.cc",
        "take_events();  // the last ones: no call may stay behind without an end",
        "",
        "ranks",
    ),
    Mutation(
        "who has its result leaves work behind",
        "engine.cc",
        "if (moved_ || !ended_.empty()) return false;",
        "",
        "ranks",
    ),
    Mutation(
        "a death isn't noticed",
        "progress.cc",
        "if (!peer.closed || peer.gone) continue;",
        "continue;",
        "ranks",
    ),
    Mutation(
        "a freeze isn't noticed",
        "progress.cc",
        "} else if (now - peer.alive > heartbeat_) {",
        "} else if (false) {",
        "ranks",
    ),
    Mutation(
        "two calls of one name",
        "engine.cc",
        "if (names_.contains({request.set, request.name})) {",
        "if (false) {",
        "engine",
    ),
    Mutation(
        "plans may differ",
        "progress.cc",
        "if (entry.plan_hash != plan_hash_) {",
        "if (false) {",
        "ends",
    ),
]


class Bench:
    """A copy of the project, built once; each mutation rebuilds what depends on its file."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree
        for name in COPIED:
            source, target = ROOT / name, tree / name
            if source.is_dir():
                shutil.copytree(
                    source, target, ignore=shutil.ignore_patterns("*.so", "__pycache__")
                )
            else:
                shutil.copy2(source, target)
        self.run(
            "cmake", "-S", ".", "-B", "build", "-G", "Ninja", "-DHOROVOD_BUILD_TESTS=ON",
            "-DCMAKE_BUILD_TYPE=None", "-DCMAKE_CXX_FLAGS=-O1 -w",
            f"-DPython_EXECUTABLE={sys.executable}",
            "-DSKBUILD_PROJECT_NAME=horovod", "-DSKBUILD_PROJECT_VERSION=0",
        )  # fmt: skip

    def run(self, *command: str) -> None:
        subprocess.run(
            command,
            cwd=self.tree,
            check=True,
            stdout=subprocess.DEVNULL,
            timeout=LONGEST_BUILD_S,
        )

    def noticed(self, test: str) -> str | None:
        """How the test fails, or None if it passes."""
        target, command = TESTS[test]
        self.run("cmake", "--build", "build", "--target", target)
        if target == "_core":
            for built in (self.tree / "build").glob("_core*.so"):
                shutil.copy2(built, self.tree / "src" / "horovod")
        try:
            done = subprocess.run(
                command,
                cwd=self.tree,
                env=os.environ | {"PYTHONPATH": str(self.tree / "src")},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=LONGEST_RUN_S,
            )
        except subprocess.TimeoutExpired:
            return f"no end in {LONGEST_RUN_S} s"
        if done.returncode == 0:
            return None
        if done.returncode < 0:
            return f"killed by signal {-done.returncode}"
        telling = [line for line in done.stdout.splitlines() if "does not hold" in line] or [
            line.strip("E ") for line in done.stdout.splitlines() if line.startswith("E  ")
        ]
        return (telling or done.stdout.splitlines()[-1:])[0][:90]

    def mutated(self, mutation: Mutation) -> str | None:
        changed = self.tree / "core" / mutation.file
        text = changed.read_text()
        changed.write_text(text.replace(mutation.old, mutation.new))
        try:
            return self.noticed(mutation.test)
        finally:
            changed.write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", nargs="+", default=[""], help="mutations whose description has one of these"
    )
    options = parser.parse_args()
    chosen = [mutation for mutation in MUTATIONS if any(w in mutation.what for w in options.only)]
    for mutation in chosen:
        places = (ROOT / "core" / mutation.file).read_text().count(mutation.old)
        if places != 1:
            raise SystemExit(f"{mutation.what}: {mutation.file} has {places} places to change")
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        for test in dict.fromkeys(mutation.test for mutation in chosen):
            if (found := bench.noticed(test)) is not None:
                print(f"{test} fails on unchanged sources: {found}")
                return 1
        for mutation in chosen:
            start = time.monotonic()
            found = bench.mutated(mutation)
            survivors += found is None
            seconds = time.monotonic() - start
            print(
                f"{mutation.what:48} {mutation.test:12} {seconds:4.0f} s  {found or 'SURVIVED'}",
                flush=True,
            )
    print(f"{len(chosen)} mutations, {survivors} survived")
    return min(survivors, 1)


if __name__ == "__main__":
    sys.exit(main())
