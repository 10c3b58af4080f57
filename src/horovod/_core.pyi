"""The core of horovod: engine, transports and kernels."""

from collections.abc import Iterable, Sequence
from typing import Any


class Failure(RuntimeError):
    """
    The engine's own error; args are (kind, text, rank), and the name of the call if it ended that.
    """

class Result:
    """What a finished call gives back; kind 0 is success."""

    @property
    def kind(self) -> int: ...

    @property
    def text(self) -> str: ...

    @property
    def rank(self) -> int: ...

    def output(self, place: int) -> Any:
        """What the core allocated for the tensor at this place in the call."""

    @property
    def outputs(self) -> list[Any | None]: ...

    @property
    def shapes(self) -> list[list[int]]: ...

    @property
    def splits(self) -> list[int] | None: ...

    @property
    def value(self) -> int: ...

class View:
    """A row-major tensor; without output the engine allocates it."""

    def __init__(self, input: int, output: int, dtype: int, shape: Sequence[int]) -> None: ...

class Form:
    """
    How the tensors of a call are read if their types have DLPack's C exchange API, and how its result is made. See core/bindings_calls.h.
    """

    def __init__(self, types: Iterable, hidden: object, memory: object, in_place: bool, allocate: object | None, one: object | None, group: object | None) -> None: ...

class Engine:
    """One rank's engine. See core/engine.h."""

    def __init__(self, rank: int, size: int, names: Sequence[str], local: dict, plan: dict, options: dict) -> None: ...

    def submit(self, kind: int, name: str, process_set: int, tensors: Sequence[View], reduce_op: int, prescale: float, postscale: float, root: int, splits: Sequence[int] | None, unnamed: bool, keep: object | None, site: int = 0, finish: object | None = None) -> int: ...

    def start(self, form: Form, kind: int, prefix: str, name: object | None, unnamed: bool, process_set: int, grouped: bool, tensors: object | None, reduce_op: int, prescale: float, postscale: float, root: int, site: int) -> int | None:
        """
        As submit, of what the form can read; else None, and nothing has happened.
        """

    def next_number(self, process_set: int, prefix: str) -> int:
        """Of the next unnamed call."""

    def renumber(self) -> None:
        """Starts those numbers again."""

    def finish(self, handle: object | None) -> object:
        """
        Waits for a call and gives its result, once; then and for no handle's number, None.
        """

    def calls(self) -> dict[int, str]:
        """Names of what was not taken yet, by handle."""

    def add_site(self, text: str) -> int: ...

    def reject(self, kind: int, name: str, process_set: int, text: str) -> None: ...

    def poll(self, handle: int) -> bool: ...

    def wait(self, handle: int, timeout_s: float) -> bool: ...

    def take(self, handle: int) -> Result: ...

    def add_process_set(self, ranks: Sequence[int], site: int = 0) -> int: ...

    def reject_process_set(self, text: str) -> None: ...

    def remove_process_set(self, id: int, site: int = 0) -> int: ...

    def process_sets(self) -> dict[int, list[int]]: ...

    def shutdown(self, reason: str, timeout_s: float) -> None: ...

    def abandon(self) -> None: ...

    def failure(self) -> tuple[int, str, int] | None: ...

    def counters(self) -> dict[str, int]: ...

    def pending(self) -> list[str]: ...

    def message_fd(self) -> int: ...

    def take_messages(self) -> list[tuple[int, str]]: ...

class Door:
    """How native adapters reach the running engine. See core/door.h."""

    def __init__(self) -> None: ...

    def open(self, engine: Engine, rank: int, size: int, local_rank: int, local_size: int) -> None: ...

    def close(self) -> None: ...

    @property
    def address(self) -> int:
        """Of the C++ object, which is there for good."""

def limit_bytes(size: int, slot_bytes: int) -> int:
    """Bytes of shared memory that the yard-stick needs."""

class Limit:
    """One rank's side of the yard-stick. See core/limit.h."""

    def __init__(self, rank: int, size: int, fd: int, slot_bytes: int, simd: str, patience_s: float, spin: bool) -> None: ...

    def barrier(self) -> None: ...

    def allreduce(self, data: int, count: int, slot_bytes: int, streaming: bool) -> tuple[float, float]:
        """
        In place, float32; returns when its first barrier and all of it was over, in seconds of the monotonic clock.
        """

def segment_bytes(local_size: int, outbox_bytes: int) -> int:
    """Bytes that a rank's shared segment must have."""

def simd_available() -> list[str]:
    """Instruction sets whose kernels run here."""

def fold(simd: str, dtype: int, op: int, prescale: float, postscale: float, divisor: int, terms: Sequence[int], out: int, slot: int, streaming: bool, count: int) -> None:
    """For tests: one kernel on plain addresses."""

def copy_to_slot(simd: str, slot: int, streaming: bool, source: int, bytes: int) -> None:
    """For tests: the copy into a transport slot."""
