"""Breaks the control plane in one place at a time and expects the simulation to notice.

Run by hand: python tests/core/mutations_control_plane.py [--jobs N] [--seeds N] [--only WORD]
Works on a copy; exits 1 if a mutation survives. Knows the sources as text only.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ["wire", "describe", "agreement", "watch", "coordinator", "order"]
FLAGS = ["-std=c++20", "-O1", "-w"]
LONGEST_COMPILE_S = 600
LONGEST_RUN_S = 300


@dataclass(frozen=True)
class Mutation:
    what: str
    file: str
    old: str
    new: str


def check_dropped(name: str, others: str) -> Mutation:
    """An agreement check leaves the table."""
    return Mutation(f"no check of {name}", "agreement.cc", f"&{name}{others}", others.lstrip(", "))


MUTATIONS = [
    # Agreement.
    check_dropped("kDType", ", &kKind"),
    check_dropped("kKind", ", &kCount"),
    check_dropped("kCount", ", &kShape"),
    check_dropped("kShape", ", &kPrescale"),
    check_dropped("kPrescale", ", &kPostscale"),
    check_dropped("kPostscale", ", &kReduceOp"),
    check_dropped("kRows", ", &kRoot"),
    Mutation("no check of the reduce op", "agreement.cc", "a.op == b.op", "true"),
    Mutation("no check of the root", "agreement.cc", "{&kRows, &kRoot}", "{&kRows}"),
    Mutation("no check of a set's ranks", "agreement.cc", "a.ranks == b.ranks", "true"),
    Mutation(
        "joined ranks don't matter", "agreement.cc", "if (joined.empty()) return {};", "return {};"
    ),
    Mutation("0-d tensors pass", "agreement.cc", "if (ranks.empty()) return {};", "return {};"),
    Mutation(
        "an id makes up for a joined rank",
        "order.cc",
        "if (!agreed_before || !absent.empty()) {",
        "if (!agreed_before) {",
    ),
    Mutation(
        "rejections are forgotten",
        "order.cc",
        "if (!call.rejected.empty()) return describe_rejection(call);",
        "",
    ),
    Mutation(
        "joined roots broadcast",
        "order.cc",
        "if (!info(call.request->kind).rooted ||",
        "if (true ||",
    ),
    # Readiness.
    Mutation(
        "one member is enough less",
        "coordinator.cc",
        "call.missing = set.members.size();",
        "call.missing = set.members.size() - (set.members.size() > 1);",
    ),
    Mutation(
        "joined ranks are waited for",
        "coordinator.cc",
        "for (int32_t rank : set.members) call.missing -= joined[static_cast<size_t>(rank)];",
        ";",
    ),
    Mutation(
        "a join completes nothing",
        "coordinator.cc",
        "} else if (--call.missing == 0) {",
        "} else if (false) {",
    ),
    Mutation("who joined is never missed again", "coordinator.cc", "++call.missing;", ";"),
    Mutation(
        "nobody returns from join",
        "order.cc",
        "if (voice.request->kind == OpKind::Join) set_joined(set.members[i], false, now);",
        "",
    ),
    Mutation(
        "the first to join is the last",
        "coordinator.cc",
        "last_joined = rank;",
        "if (last_joined < 0) last_joined = rank;",
    ),
    Mutation(
        "the next round falls into one that is agreed on",
        "coordinator.cc",
        "voice.said == Voice::Said::Rejected || call.place != Call::Place::Waiting",
        "voice.said == Voice::Said::Rejected",
    ),
    Mutation(
        "a call after a rejection is lost",
        "order.cc",
        "for (Held& next : call.later) held.push_back(std::move(next));",
        "",
    ),
    # Entries.
    Mutation(
        "entries go to one rank too few",
        "order.cc",
        "outbox.push_back({std::move(to), std::move(entry)});",
        "if (to.size() > 1) to.pop_back();\n  outbox.push_back({std::move(to), std::move(entry)});",
    ),
    Mutation(
        "entries go to non-contributors",
        "order.cc",
        "std::vector<int32_t> to = entry.contributors;",
        "std::vector<int32_t> to = sets.at(0).members;",
    ),
    Mutation(
        "contributors are all members",
        "order.cc",
        "entry.contributors = first.everyone ? set.members : first.contributors;",
        "entry.contributors = set.members;",
    ),
    Mutation("numbers repeat", "order.cc", "entry.seq = next_seq++;", "entry.seq = next_seq;"),
    Mutation("three entries in flight", "order.cc", "kMostInFlight = 2;", "kMostInFlight = 3;"),
    Mutation("an entry never ends", "coordinator.cc", "flights.erase(flight);", ""),
    Mutation(
        "different contributors fuse",
        "order.cc",
        "call.everyone == everyone && (everyone || call.contributors == entry.contributors);",
        "true;",
    ),
    Mutation(
        "different work fuses",
        "fusion.h",
        "return a.kind == b.kind && a.op == b.op && bits(a.prescale) == bits(b.prescale) &&",
        "return true ||",
    ),
    Mutation("no limit", "order.cc", "call.bytes > limits.entry_bytes - bytes ||", ""),
    Mutation(
        "groups are not kept apart",
        "fusion.h",
        "limits.groups_apart && request.tensors.size() > 1",
        "false",
    ),
    Mutation("blocked callers wait", "order.cc", "||\n         someone_waits(set);", ";"),
    Mutation(
        "who starts to wait is ignored", "coordinator.cc", "  *flag = true;\n  block(rank, +1);", ""
    ),
    Mutation(
        "what can't fuse waits for ever",
        "order.cc",
        "if (!flush && set.alone.empty()) return;",
        "if (!flush) return;",
    ),
    # Ids.
    Mutation("ids repeat", "order.cc", "item.id = next_id++;", "item.id = 1 + next_id++ % 3;"),
    Mutation(
        "a changed call keeps its id",
        "cache.h",
        "if (place->request.get() != &request && !(*place->request == request)) return 0;",
        "",
    ),
    Mutation(
        "a name is missing",
        "order.cc",
        "all_know = all_know && (voice.said",
        "all_know = all_know || (voice.said",
    ),
    Mutation(
        "a new id comes without a name",
        "order.cc",
        "if (!all_know) item.name = call.name;",
        "if (item.id == 0) item.name = call.name;",
    ),
    Mutation(
        "unnamed calls get ids",
        "order.cc",
        "options.cache_capacity > 0 && !call.request->unnamed",
        "options.cache_capacity > 0",
    ),
    Mutation("an announced id is evicted", "cache.h", "if (!place->announced) {", "if (false) {"),
    Mutation(
        "unknown ids are not asked for",
        "coordinator.cc",
        "outbox.push_back({{rank}, Resend{item.id}});",
        "",
    ),
    Mutation(
        "a join overtakes what is resent",
        "coordinator.cc",
        "if (concerns_all_ranks(item.request.kind) && !ids.empty()) {",
        "if (false) {",
    ),
    Mutation(
        "an answer doesn't say what it answers",
        "announcer.h",
        "return Announce{*open->request, open->blocked, id, {}};",
        "return Announce{*open->request, open->blocked, 0, {}};",
    ),
    # Terms.
    Mutation(
        "terms are mixed up",
        "order.cc",
        "*payload++ += voice.payload;",
        "*payload += voice.payload;",
    ),
    Mutation(
        "terms without a limit",
        "order.cc",
        "terms_bytes <= options.inline_bytes;",
        "true;",
    ),
    Mutation(
        "the first calls' terms do",
        "order.cc",
        "carries = carries && call",
        "carries = call",
    ),
    Mutation(
        "a payload may be missing",
        "order.cc",
        "if (voice.payload.size() != bytes.value_or(voice.payload.size())) return 0;",
        "if (voice.payload.empty()) continue;",
    ),
    Mutation(
        "what was said too early loses its payload",
        "coordinator.cc",
        "said.blocked, {}, std::move(said.payload)}",
        "said.blocked, {}, {}}",
    ),
    Mutation(
        "an entry with its terms never ends",
        "order.cc",
        "for (const std::string& payload : payloads) entry.terms += payload;",
        "for (const std::string& payload : payloads) entry.terms += payload;\n    ++set.in_flight;",
    ),
    # Sets.
    Mutation(
        "uids repeat",
        "order.cc",
        "const uint32_t uid = next_set++;",
        "uint32_t uid = 1;\n  while (sets.contains(uid)) ++uid;",
    ),
    Mutation("equal sets", "order.cc", "if (other.members == ranks) {", "if (false) {"),
    Mutation(
        "ready calls survive their set",
        "order.cc",
        "while (!removed.fusing.empty()) fail_pending(removed.fusing.front());",
        "",
    ),
    Mutation(
        "waiting calls survive their set",
        "order.cc",
        "if (pending.set == uid) fail_pending(pending);",
        "",
    ),
    Mutation(
        "the global set is removed",
        "order.cc",
        "if (uid == 0 || it == sets.end()) {",
        "if (it == sets.end()) {",
    ),
    # Leaving and clocks.
    Mutation(
        "nobody hears that one left",
        "coordinator.cc",
        "if (!set.has(rank)) continue;\n    fail(",
        "continue;\n    fail(",
    ),
    Mutation(
        "a set forgets who left", "coordinator.cc", "if (set->left < 0) set->left = rank;", ""
    ),
    Mutation(
        "the one that left is told",
        "coordinator.cc",
        "call.name), now, rank);",
        "call.name), now);",
    ),
    Mutation("let go before its calls", "order.cc", "if (!may_go(rank)) return false;", ""),
    Mutation("never let go", "order.cc", "if (!may_go(rank)) return false;", "return false;"),
    Mutation(
        "no deadlock is seen",
        "watch.cc",
        "next = std::min(next, last_arrival_ + options_.deadlock);",
        "",
    ),
    Mutation(
        "a deadlock is seen too early",
        "order.cc",
        "waiting_ranks == live_ranks &&",
        "waiting_ranks > 0 &&",
    ),
    Mutation(
        "stalls are not reported",
        "watch.cc",
        "if (!stall.told && stall.inquiry.over(now)) tell(stall, now);",
        "stall.told = stall.told || stall.inquiry.over(now);",
    ),
    Mutation(
        "a report waits for every answer",
        "inquiry.h",
        "return open_ == 0 || now >= until_;",
        "return open_ == 0;",
    ),
    Mutation(
        "an answer is a sign of life",
        "coordinator.cc",
        "if (!std::holds_alternative<Located>(item)) s.watch.arrived(now);",
        "s.watch.arrived(now);",
    ),
    Mutation("two aborts", "coordinator.cc", "      s.aborted = true;\n", ""),
]


def run(command: list[str], cwd: Path, limit_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=limit_s)


def compile_one(source: Path, tree: Path, output: Path) -> None:
    command = ["c++", *FLAGS, "-I.", "-c", str(source), "-o", str(output)]
    result = run(command, tree, LONGEST_COMPILE_S)
    if result.returncode != 0:
        raise RuntimeError(f"{source} doesn't compile:\n{result.stderr[:2000]}")


def copy_tree(source: Path, to: Path) -> None:
    for part in ["core", "tests/core/cpp"]:
        shutil.copytree(source / part, to / part)


class Bench:
    """The unchanged objects, and what is built of them with one change."""

    def __init__(self, work: Path, seeds: int) -> None:
        self.work = work
        self.seeds = seeds
        self.base = work / "base"
        copy_tree(ROOT, self.base)
        for name in SOURCES:
            compile_one(Path(f"core/{name}.cc"), self.base, self.base / f"{name}.o")
        simulation = Path("tests/core/cpp/core_simulate.cc")
        compile_one(simulation, self.base, self.base / "core_simulate.o")

    def simulate(self, objects: list[Path], tree: Path) -> str | None:
        """What the simulation found, or None."""
        program = tree / "core_simulate"
        result = run(["c++", *map(str, objects), "-o", str(program)], tree, LONGEST_COMPILE_S)
        if result.returncode != 0:
            raise RuntimeError(result.stderr[:2000])
        try:
            result = run([str(program), "--seeds", str(self.seeds)], tree, LONGEST_RUN_S)
        except subprocess.TimeoutExpired:
            return "it doesn't end"
        if result.returncode == 0:
            return None
        if result.returncode < 0:
            return f"killed by signal {-result.returncode}"
        return result.stdout.splitlines()[0]

    def unchanged(self) -> str | None:
        """What the simulation finds without a change: nothing."""
        return self.simulate(
            [self.base / f"{name}.o" for name in [*SOURCES, "core_simulate"]], self.base
        )

    def mutated(self, number: int, mutation: Mutation) -> str | None:
        tree = self.work / str(number)
        copy_tree(self.base, tree)
        changed = tree / "core" / mutation.file
        text = changed.read_text()
        if text.count(mutation.old) != 1:
            raise RuntimeError(f"{mutation.what}: {text.count(mutation.old)} places to change")
        changed.write_text(text.replace(mutation.old, mutation.new))
        objects = []
        for name in [*SOURCES, "core_simulate"]:
            folder = "tests/core/cpp" if name == "core_simulate" else "core"
            if mutation.file.endswith(".h") or mutation.file == f"{name}.cc":
                compile_one(Path(f"{folder}/{name}.cc"), tree, tree / f"{name}.o")
                objects.append(tree / f"{name}.o")
            else:
                objects.append(self.base / f"{name}.o")
        found = self.simulate(objects, tree)
        shutil.rmtree(tree)
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=5000)
    parser.add_argument("--only", default="", help="mutations whose description has this word")
    options = parser.parse_args()
    chosen = [mutation for mutation in MUTATIONS if options.only in mutation.what]
    survivors = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        bench = Bench(Path(folder), options.seeds)
        if (found := bench.unchanged()) is not None:
            print(f"the simulation fails on unchanged sources: {found}")
            return 1
        results = pool.map(bench.mutated, range(len(chosen)), chosen)
        for mutation, found in zip(chosen, results, strict=True):
            survivors += found is None
            print(f"{mutation.what}: {found or 'SURVIVED'}", flush=True)
    print(f"{len(chosen)} mutations, {survivors} survived")
    return min(survivors, 1)


if __name__ == "__main__":
    sys.exit(main())
