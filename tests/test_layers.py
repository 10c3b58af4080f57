"""Who may import whom and what no layer may do: the table of ARCHITECTURE.md, enforced on source.

Reads text only: it imports nothing of the project, so a broken build can't hide a breach.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# ---------------------------------------------------------------------------------------------
# The table for Python. Within an area that has rows, a module imports those above its own.

# Bottom up; modules of one row don't import each other.
COMMON = [
    ["exceptions", "knobs", "logs", "compression", "capabilities", "sites"],
    ["config", "sockets", "kinds"],
    ["frames", "proof"],
    ["store_server"],
    ["store"],
    ["wiring"],
    ["basics"],
    ["process_sets"],
    ["ops"],
    ["objects", "elastic", "util"],
]
TORCH = [
    ["device", "names", "window", "compression"],
    ["views", "weights", "wrapping"],
    ["ops"],
    ["collectives", "gather", "sparse"],
    ["library"],
    ["differentiable"],
    ["functions", "metrics", "sharding", "checkpoint", "flights"],
    ["reducer"],
    ["delta", "overlap", "sync_batch_norm"],
    ["optimizer", "mpi_ops"],
]
TENSORFLOW = [
    ["compression", "internals", "native", "stablehlo", "util", "forwarding"],
    ["names", "rows"],
    ["xla"],
    ["calls"],
    ["gradients"],
    ["collectives"],
    ["functions", "mpi_ops", "reduction"],
    ["tape", "delta", "gradient_aggregation", "hook", "sync_batch_norm"],
    ["gradient_aggregation_eager"],
    ["keras"],
    ["optimizer"],
]
BENCH = [
    ["points", "limit"],
    ["worker"],
    ["report"],
    ["command"],
]
KERAS = [
    ["flavours", "settings"],
    ["on_tensorflow", "on_torch"],
    ["distributed"],
    ["callbacks", "keras3", "tf_keras"],
    ["face", "loading"],
]
ROWS = {"common": COMMON, "torch": TORCH, "tensorflow": TENSORFLOW, "_keras": KERAS, "bench": BENCH}
# data is for all frameworks; _keras is what the faces for tf.keras and keras share
ADAPTERS = {"torch", "tensorflow", "_keras", "keras", "jax", "numpy", "data"}
ADAPTER_EXCEPTIONS = {
    ("keras", "tensorflow"),
    ("keras", "_keras"),
    ("tensorflow", "_keras"),  # from tensorflow.keras
    ("_keras", "tensorflow"),  # from on_tensorflow
    ("_keras", "torch"),  # from on_torch
}
AREAS = {"common", "runner", "bench", *ADAPTERS}
RUNNER_MAY_IMPORT = {"exceptions", "config", "store"}
CORE_OWNERS = {"common.basics", "common.mpi", "bench.limit"}
READS_ENVIRONMENT = {"common.config", "common.basics", "common.util"}
FRAMEWORKS = {"torch", "tensorflow", "keras", "jax", "jaxlib", "numpy", "mxnet"}
THIRD_PARTY = {
    "common": {"cloudpickle", "yaml", "cryptography", "mpi4py"},
    "runner": {"cloudpickle", "yaml", "psutil"},
    "torch": {"torch", "cloudpickle", "packaging"},
    "tensorflow": {"tensorflow", "keras", "numpy", "cloudpickle"},
    "_keras": {"tensorflow", "keras", "tf_keras", "torch", "numpy", "h5py"},
    "keras": {"tensorflow", "keras", "numpy", "cloudpickle"},
    "jax": {"jax", "jaxlib", "numpy", "cloudpickle"},
    "numpy": {"numpy", "cloudpickle"},
}

# ---------------------------------------------------------------------------------------------
# The table for C++: stem of the file -> layer. A stem without a row borrows that of its first
# word, so kernels_avx2 is a kernels file. A file includes its own layer and lower ones, except:
# L4 sees types, wire and itself only; only bindings sees Python.

CORE = {
    "types": 0,
    "wire": 1,
    "kernels": 1,
    "stores": 1,
    "wait": 1,
    "timeline": 1,
    "transport": 2,
    "shm": 2,
    "limit": 2,
    "tcp": 2,
    "schedule": 3,
    "algorithms": 3,
    "adasum": 3,
    "communicator": 3,
    "mesh": 3,
    "collective": 3,
    "nccl": 3,
    "coordinator": 4,
    "call_map": 4,
    "cache": 4,
    "announcer": 4,
    "fusion": 4,
    "calls": 4,
    "order": 4,
    "watch": 4,
    "inquiry": 4,
    "agreement": 4,
    "describe": 4,
    "progress": 5,
    "engine": 5,
    "door": 5,
    "bindings": 6,
}
L4_MAY_INCLUDE = {"types", "wire"}
NATIVE_MAY_INCLUDE = {"core/door.h", "core/types.h"}  # of core/; a folder of native/, itself
DECISIONS = {stem for stem, layer in CORE.items() if layer == 4} | {"schedule", "algorithms"}

FORBIDDEN_IN_CORE = [
    (r"\b(?:secure_)?getenv\s*\(|\benviron\b", "reads the environment"),
    (r"(?<![\w.>:])(?:::|std::)?(?:abort|exit|_exit|_Exit|quick_exit)\s*\(", "ends the process"),
    (r"\bstd::c(?:out|err|log)\b|\b(?:f?printf|f?puts|perror)\s*\(", "prints"),
    (r"(?<!static_)\bassert\s*\(", "asserts"),
    (r"(?<![\w.>:])(?:::)?(?:bind|listen|accept4?|connect|getaddrinfo)\s*\(", "opens a door"),
    (r"\batomic_thread_fence\s*\(", "uses a stand-alone fence, which TSAN can't follow"),
]
FORBIDDEN_IN_DECISIONS = [
    (r"_clock::now\b|\bclock_gettime\b|\bgettimeofday\b", "reads a clock"),
    (r"\bstd::(?:thread|jthread|mutex|condition_variable|atomic)\b", "uses threads"),
]  # a decision is a pure function: no I/O, no thread, no clock
IMPURE_HEADERS = {"thread", "mutex", "condition_variable", "atomic", "fstream"}
FRAMEWORK_HEADERS = re.compile(
    r"^(torch|ATen|c10|tensorflow|xla|jax|cuda|cuda_runtime|nccl|mpi)(/|\.h|$)"
)
PYTHON_HEADERS = re.compile(r"^(nanobind/|Python\.h$|pybind11/)")


# ---------------------------------------------------------------------------------------------
# Python


def imports_of(name: str, source: str) -> Iterator[tuple[int, str]]:
    """Every module that `name` imports anywhere in its text, relative imports resolved."""
    package = name.split(".") if name.endswith("__init__") else name.split(".")[:-1]
    if name.endswith("__init__"):
        package = package[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = ["horovod", *package][: len(package) + 2 - node.level]
                base = ".".join([*parents, *([base] if base else [])])
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def environment_reads(source: str) -> Iterator[int]:
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            of_os = isinstance(node.value, ast.Name) and node.value.id == "os"
            touched = of_os and node.attr in names
        elif isinstance(node, ast.ImportFrom):
            touched = node.module == "os" and any(alias.name in names for alias in node.names)
        else:
            continue
        if touched:
            yield node.lineno


def owned(target: str, modules: Mapping[str, str]) -> str | None:
    """The module of ours that `horovod.<...>` means: the longest prefix that is a file."""
    parts = target.split(".")
    if parts[0] != "horovod":
        return None
    if "_core" in parts:
        return "_core"
    for end in range(len(parts), 1, -1):
        name = ".".join(parts[1:end])
        for candidate in (name, f"{name}.__init__"):
            if candidate in modules:
                return candidate
    return ".".join(parts[1:3]) if parts[1:] and parts[1] in AREAS else "__init__"


def python_breaches(modules: Mapping[str, str]) -> list[str]:
    """Breaches in `modules`: dotted name below horovod (packages end in __init__) -> source."""
    level = {
        (area, module): number
        for area, rows in ROWS.items()
        for number, row in enumerate(rows)
        for module in row
    }
    breaches = []

    def is_below(name: str, other: str) -> bool:
        """Whether a module may import another one of its area; a package's __init__ is free."""
        (area, module, *_), (to_area, to_module, *_) = name.split("."), other.split(".")
        own, to = level.get((area, module)), level.get((to_area, to_module))
        return own is None or to is None or to < own or to_module == module

    def judge(name: str, target: str) -> str | None:
        area = name.split(".")[0]
        if area in ADAPTERS and area == name:
            return "is an adapter, and adapters are packages"
        ours = owned(target, modules)
        top = target.split(".")[0]
        if ours is None:
            if top in sys.stdlib_module_names:
                return None
            if top in THIRD_PARTY.get(area, set()):
                return None
            kind = "a framework" if top in FRAMEWORKS else "a foreign package"
            return f"imports {top}, {kind} that its layer may not know"
        if ours == "_core":
            return None if name in CORE_OWNERS else "imports _core, which basics owns"
        to_area, _, to_module = ours.partition(".")
        to_top = to_module.split(".")[0]
        if ours == "__init__":
            return None  # the version
        if area == "__init__":
            return None if to_area == "runner" else f"imports {ours}"
        if area == "runner":
            if to_area == "runner" or (to_area == "common" and to_top in RUNNER_MAY_IMPORT):
                return None
            if ours == "common.__init__":
                return None
            return f"imports {ours}; runner knows only {sorted(RUNNER_MAY_IMPORT)} of common"
        if area == "__main__":
            return None if to_area in {"runner", "bench"} else f"imports {ours}"
        if area == "bench":
            if to_area == "runner":
                return None if name == "bench.command" else f"imports {ours}; command starts jobs"
            if to_area != "bench":
                return None if to_area == "common" else f"imports {ours}, an adapter's"
            return None if is_below(name, ours) else f"imports {ours}, which is not below it"
        if area in ADAPTERS:
            if to_area == area:
                return None if is_below(name, ours) else f"imports {ours}, which is not below it"
            if to_area == "common" or (area, to_area) in ADAPTER_EXCEPTIONS:
                return None
            return f"imports {ours}; an adapter knows only itself and common"
        if area == "common":
            if to_area != "common":
                return f"imports {ours}; common knows nothing above it"
            return None if is_below(name, ours) else f"imports {ours}, which is not below it"
        return f"imports {ours}"

    for name, source in sorted(modules.items()):
        area, _, module = name.partition(".")
        has_row = module == "__init__" or (area, module.split(".")[0]) in level
        if area in ROWS and not has_row:
            breaches.append(f"{name}: has no row in the table of {Path(__file__).name}")
        if area not in {"__init__", "__main__", "mxnet", *AREAS}:
            breaches.append(f"{name}: has no row in the table of {Path(__file__).name}")
            continue
        for line, target in imports_of(name, source):
            verdict = judge(name, target)
            if verdict:
                breaches.append(f"{name}:{line}: {verdict}")
        if name not in READS_ENVIRONMENT:
            for line in environment_reads(source):
                breaches.append(f"{name}:{line}: touches the environment")
    return list(dict.fromkeys(breaches))


# ---------------------------------------------------------------------------------------------
# C++


def bare(source: str) -> str:
    """`source` with comments, literals and preprocessor lines blanked, line numbers kept."""
    pattern = re.compile(
        r"//[^\n]*|/\*.*?\*/|R\"(\w*)\(.*?\)\1\"|\"(?:\\.|[^\"\\\n])*\"|(?<!\w)'(?:\\.|[^'\\\n])+'"
        r"|^[ \t]*#(?:\\\n|[^\n])*",
        re.DOTALL | re.MULTILINE,
    )
    return pattern.sub(
        lambda found: ("0" if found[0][0] in "\"'R" else " ") + "\n" * found[0].count("\n"), source
    )


def namespace_statements(text: str) -> Iterator[tuple[int, str, str]]:
    """(offset, head, body) of each statement at namespace scope; body is what its braces hold."""
    at = start = 0
    while at < len(text):
        character = text[at]
        if character == ";":
            yield start, text[start:at], ""
            start = at + 1
        elif character == "}":
            start = at + 1  # the end of a namespace
        elif character == "{":
            head = text[start:at]
            if re.search(r"\bnamespace\b|\bextern\s*0\s*$", head) and "=" not in head:
                start = at + 1
            else:
                depth, end = 1, at + 1
                while end < len(text) and depth:
                    depth += {"{": 1, "}": -1}.get(text[end], 0)
                    end += 1
                if is_function(head) and re.match(r"\s*[,){]", text[end:]):
                    at = end  # a member's braces before the body of a constructor
                    continue
                yield start, head, text[at + 1 : end - 1]
                at = end
                rest = re.match(r"([^;{}]*);", text[at:])  # of `struct S { } s;` and `int x{1};`
                if rest and not is_function(head):
                    if rest[1].strip():
                        yield start, rest[1], ""
                    at += rest.end()
                start = at
                continue
        at += 1


def is_function(head: str) -> bool:
    return "(" in head.split("=")[0] or "operator" in head


def is_constant(declaration: str) -> bool:
    return bool(re.search(r"\b(?:const|constexpr|constinit const|consteval)\b", declaration))


def mutable_globals(source: str) -> Iterator[tuple[int, str]]:
    """Heuristic: variables at namespace scope, statics in bodies, that aren't constants."""
    text = bare(source)
    other = r"\s*(?:template|using|typedef|friend|static_assert|namespace|enum)\b|\s*$"
    for offset, head, body in namespace_statements(text):
        line = text.count("\n", 0, offset + len(head) - len(head.lstrip())) + 1
        declared = head.strip()
        is_type = re.match(r"(?:struct|class|union)\b[^()=]*$", declared)
        if not (re.match(other, head) or is_type or is_function(head) or is_constant(head)):
            yield line, declared
        for found in re.finditer(r"\b(?:static|thread_local)\s+([^;{}()=]*)[(=;{]", body):
            function = found[0].endswith("(") and "mutex" not in found[0]
            if not function and not is_constant(found[0]):
                yield line + body.count("\n", 0, found.start()), found[0].strip(" ={(;")


def stem_of(name: str) -> str:
    stem = Path(name).stem
    return stem if stem in CORE else stem.split("_")[0]


def core_breaches(files: Mapping[str, str]) -> list[str]:
    """Breaches in `files`: name in core/ -> source."""
    breaches = []
    for name, source in sorted(files.items()):
        stem = stem_of(name)
        if stem not in CORE:
            breaches.append(f"core/{name}: has no row in the table of {Path(__file__).name}")
            continue
        for number, line in enumerate(source.splitlines(), 1):
            here = f"core/{name}:{number}:"
            if own := re.match(r'\s*#\s*include\s+"([^"]+)"', line):
                other = stem_of(own[1].rpartition("/")[2])
                if other not in CORE:
                    breaches.append(f"{here} includes {own[1]}, which has no row")
                elif CORE[other] > CORE[stem]:
                    breaches.append(f"{here} includes {own[1]}, which is above it")
                elif CORE[stem] == 4 and CORE[other] < 4 and other not in L4_MAY_INCLUDE:
                    breaches.append(f"{here} includes {own[1]}; decisions know types and wire only")
            elif system := re.match(r"\s*#\s*include\s+<([^>]+)>", line):
                header = system[1]
                if PYTHON_HEADERS.match(header) and stem != "bindings":
                    breaches.append(f"{here} includes {header}; only bindings knows Python")
                if FRAMEWORK_HEADERS.match(header):
                    breaches.append(f"{here} includes {header}, a framework's")
                impure = header in IMPURE_HEADERS or header.startswith("sys/")
                if stem in DECISIONS and impure:
                    breaches.append(f"{here} includes {header}; a decision is a pure function")
        rules = FORBIDDEN_IN_CORE + (FORBIDDEN_IN_DECISIONS if stem in DECISIONS else [])
        for number, line in enumerate(bare(source).splitlines(), 1):
            for pattern, what in rules:
                if re.search(pattern, line):
                    breaches.append(f"core/{name}:{number}: {what}: {line.strip()}")
        for number, what in mutable_globals(source):
            breaches.append(f"core/{name}:{number}: global mutable state: {what}")
    return breaches + twice_defined(files)


def native_breaches(files: Mapping[str, str]) -> list[str]:
    """Breaches in `files`: path within native/ -> source. A folder there is a framework's."""
    breaches = []
    for name, source in sorted(files.items()):
        folder = name.rpartition("/")[0]
        for number, line in enumerate(source.splitlines(), 1):
            here = f"native/{name}:{number}:"
            if own := re.match(r'\s*#\s*include\s+"([^"]+)"', line):
                other = own[1].removeprefix("native/")
                beside = f"{folder}/{other}".lstrip("/")
                shared = own[1].startswith("native/") and "/" not in other
                if own[1] not in NATIVE_MAY_INCLUDE and beside not in files and not shared:
                    breaches.append(f"{here} includes {own[1]}; native code knows the door only")
            elif system := re.match(r"\s*#\s*include\s+<([^>]+)>", line):
                header = system[1]
                if any(known.match(header) for known in (FRAMEWORK_HEADERS, PYTHON_HEADERS)):
                    breaches.append(f"{here} includes {header}: nothing is built against it")
        for number, line in enumerate(bare(source).splitlines(), 1):
            for pattern, what in FORBIDDEN_IN_CORE:
                if re.search(pattern, line):
                    breaches.append(f"native/{name}:{number}: {what}: {line.strip()}")
    return breaches


def twice_defined(files: Mapping[str, str]) -> list[str]:
    """Headers that define one name differently: the linker would silently keep either."""
    homes: dict[str, str] = {}
    breaches = []
    for name, source in sorted(files.items()):
        if name.endswith(".h"):
            definition = r"^(?:struct|class|enum class|union) ([\w:]+)[^;(]*?\{"
            shared = re.split(r"\bnamespace\s*\{", bare(source))[0]
            for found in re.finditer(definition, shared, re.M):
                if homes.setdefault(found[1], name) != name:
                    breaches.append(f"core/{name}: defines {found[1]}, as {homes[found[1]]} does")
    return breaches


# ---------------------------------------------------------------------------------------------
# The tests


def python_tree() -> dict[str, str]:
    root = ROOT / "src" / "horovod"
    return {
        ".".join(path.relative_to(root).with_suffix("").parts): path.read_text("utf-8")
        for path in root.rglob("*.py")
    }


def core_tree() -> dict[str, str]:
    paths = [p for p in (ROOT / "core").iterdir() if p.suffix in {".h", ".cc"}]
    return {path.name: path.read_text("utf-8") for path in paths}


def test_python_keeps_to_the_table() -> None:
    modules = python_tree()
    assert "common.exceptions" in modules
    assert python_breaches(modules) == []


def test_core_keeps_to_the_table() -> None:
    files = core_tree()
    assert "types.h" in files
    assert core_breaches(files) == []


def test_native_code_keeps_to_the_table() -> None:
    root = ROOT / "native"
    files = {
        str(path.relative_to(root)): path.read_text("utf-8")
        for path in root.rglob("*")
        if path.suffix in {".h", ".cc"}
    }
    assert "tensorflow/library.cc" in files
    assert native_breaches(files) == []


@pytest.mark.parametrize(
    "source",
    [
        '#include "core/engine.h"',
        '#include "native/jax/ops.h"',
        '#include "missing.h"',
        "#include <tensorflow/c/ops.h>",
        "#include <Python.h>",
        'void f() { getenv("X"); }',
    ],
)
def test_a_breach_of_native_code_is_found(source: str) -> None:
    sound = {"turns.h": '#include "core/door.h"', "tensorflow/api.h": "#include <string>"}
    sound["tensorflow/ops.cc"] = '#include "api.h"\n#include "native/turns.h"'
    assert native_breaches(sound) == []
    assert native_breaches({**sound, "tensorflow/bad.cc": source}) != []


def test_core_is_one_folder() -> None:
    assert [p.name for p in (ROOT / "core").iterdir() if p.is_dir()] == []


SOUND = {
    "__init__": "__version__ = '1'\nfrom horovod.runner import run",
    "common.__init__": "",
    "common.exceptions": "",
    "common.config": "import os\nx = os.environ",
    "common.store": "from . import exceptions\nfrom horovod.common.config import x",
    "common.basics": "from horovod import _core\nfrom horovod.common import store",
    "common.ops": "from horovod.common.basics import x",
    "torch.__init__": "import torch\nfrom horovod.torch.ops import f\nimport horovod.common.ops",
    "torch.ops": "from ..common import ops\nimport horovod.common.basics",
    "tensorflow.__init__": "import tensorflow",
    "keras.__init__": "from horovod import tensorflow",
    "runner.__init__": "from . import launch\nimport horovod.common.store",
    "runner.launch": "import yaml, json\nfrom horovod import __version__\n",
    "bench.command": "from horovod.runner import launch\nfrom horovod.bench import worker",
    "bench.limit": "from horovod import _core",
    "bench.worker": "from horovod.bench import limit, points\nfrom horovod.common import ops",
    "__main__": "from horovod.runner import launch",
}

PYTHON_CASES = [
    ("runner.launch", "import torch"),
    ("runner.launch", "from horovod.common import basics"),
    ("runner.launch", "from ..common import basics"),
    ("runner.launch", "def f():\n    import horovod._core"),
    ("runner.launch", "import os\nos.environ['X'] = '1'"),
    ("runner.launch", "from os import getenv"),
    ("runner.launch", "import requests"),
    ("common.store", "from horovod import _core"),
    ("common.store", "from horovod.common.ops import x"),
    ("common.store", "from .basics import x"),
    ("common.ops", "import torch"),
    ("common.ops", "import numpy"),
    ("common.ops", "from horovod.runner import launch"),
    ("common.exceptions", "import horovod.common.config"),
    ("common.misc", ""),
    ("torch.ops", "from horovod.tensorflow import x"),
    ("torch.ops", "import horovod.runner.launch"),
    ("torch.ops", "from horovod._core import Engine"),
    ("torch.ops", "import tensorflow"),
    ("torch.views", "def f():\n    from horovod.torch import ops"),
    ("torch.views", "from .ops import submit"),
    ("torch.misc", ""),
    ("data.__init__", "import torch"),
    ("tensorflow.__init__", "import horovod.keras"),
    ("bench.worker", "from horovod.runner import launch"),
    ("bench.worker", "import numpy"),
    ("bench.worker", "from horovod import _core"),
    ("bench.points", "from horovod.bench import worker"),
    ("bench.misc", ""),
    ("runner.launch", "from horovod.bench import command"),
    ("utils", ""),
    ("__init__", "from horovod.torch import allreduce"),
]


def test_a_sound_python_tree_passes() -> None:
    assert python_breaches(SOUND) == []


@pytest.mark.parametrize(("name", "source"), PYTHON_CASES)
def test_a_python_breach_is_found(name: str, source: str) -> None:
    breaches = python_breaches({**SOUND, name: source})
    assert len(breaches) == 1, breaches
    assert breaches[0].startswith(f"{name}:")


SOUND_CORE = {
    "types.h": """#pragma once
#include <vector>
namespace horovod {
enum class Op : int { A, B };
struct Row { int x = 1; static Row make(); };
inline constexpr int kRows[] = {1, 2};
template <class T> T twice(T t) { return t + t; }
inline int f(const Row& row) { static const int k = 3; return row.x + k; }
class Later;
using Shape = std::vector<int>;
static_assert(sizeof(int) == 4, "no \\"environ\\" here");  // getenv( in a comment
}  // namespace horovod
""",
    "wire.h": '#include "types.h"\n',
    "kernels_avx2.cc": '#include "core/kernels.h"\n#include <immintrin.h>\n',
    "kernels.h": '#include "types.h"\n',
    "shm.cc": """#include "transport.h"
namespace horovod { namespace {
const char* const kName = "shm";
std::atomic<int>* where(int* at);
bool operator==(Row a, Row b) { return a.x == b.x; }
Shm::Shm(int a) : a_{a}, b_(Row{}) { int local = 1; f(local); }
} }""",
    "transport.h": '#include "wait.h"\n',
    "coordinator.cc": '#include "wire.h"\n#include "cache.h"\nvoid f() { std::bind(g); }\n',
    "cache.h": "#pragma once\n",
    "engine.cc": '#include "coordinator.h"\n#include "mesh.h"\n',
    "bindings.cc": '#include <nanobind/nanobind.h>\n#include "engine.h"\nNB_MODULE(_core, m) { }\n',
}

CORE_CASES = [
    ("types.h", '#include "wire.h"'),
    ("shm.cc", '#include "mesh.h"'),
    ("mesh.cc", '#include "coordinator.h"'),
    ("coordinator.cc", '#include "transport.h"'),
    ("coordinator.cc", '#include "schedule.h"'),
    ("coordinator.cc", "#include <thread>"),
    ("coordinator.cc", "auto f() { return std::chrono::steady_clock::now(); }"),
    ("algorithms.cc", "#include <sys/socket.h>"),
    ("engine.cc", "#include <nanobind/nanobind.h>"),
    ("engine.cc", "#include <Python.h>"),
    ("engine.cc", "#include <torch/extension.h>"),
    ("engine.cc", 'void f() { std::getenv("X"); }'),
    ("engine.cc", "void f() { abort(); }"),
    ("engine.cc", "void f() { std::exit(1); }"),
    ("engine.cc", 'void f() { std::cerr << "x"; }'),
    ("engine.cc", 'void f() { fprintf(stderr, "x"); }'),
    ("engine.cc", "void f(int x) { assert(x); }"),
    ("engine.cc", "void f(int s) { ::listen(s, 5); }"),
    ("engine.cc", "namespace a { int counter; }"),
    ("engine.cc", "namespace { std::atomic<int> counter{0}; }"),
    ("engine.cc", "static std::map<int, int> table;"),
    ("engine.cc", "int f() { static int calls = 0; return ++calls; }"),
    ("engine.cc", "int f() { thread_local std::vector<int> scratch; return 1; }"),
    ("engine.cc", "Foo* instance = nullptr;"),
    ("engine.cc", "struct S { static int count; };"),
    ("engine.cc", "struct S { int x; } state;"),
    ("wire.h", "struct Row { int y; };"),
    ("helper.cc", ""),
]


def test_a_sound_core_passes() -> None:
    assert core_breaches(SOUND_CORE) == []


@pytest.mark.parametrize(("name", "source"), CORE_CASES)
def test_a_core_breach_is_found(name: str, source: str) -> None:
    breaches = core_breaches({**SOUND_CORE, name: source})
    assert len(breaches) == 1, breaches
    assert breaches[0].startswith(f"core/{name}:")
