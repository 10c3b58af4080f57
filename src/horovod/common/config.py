"""Every knob as one row: flag, variable, YAML key, default, help; must not know what uses it.

The command line, the environment of the workers, the configuration file and
``docs/configuration.md`` are all read from the rows of :data:`KNOBS` in ``knobs.py``. Together with
``basics.py`` this is the only place that reads the environment.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace

from horovod.common.knobs import KNOBS as KNOBS
from horovod.common.knobs import Effect as Effect
from horovod.common.knobs import Knob as Knob

#: What other starters put into the environment of the processes they start, and how we call them.
_FOREIGN_SIZES = (
    ("OMPI_COMM_WORLD_SIZE", "mpirun of Open MPI"),
    ("PMI_SIZE", "an MPI or Slurm starter (PMI)"),
    ("WORLD_SIZE", "torchrun or a similar starter"),
    ("SLURM_STEP_NUM_TASKS", "srun"),
)


@dataclass(frozen=True)
class Settings:
    """What one worker was told, typed. Durations are in the unit that the name ends with.

    A duration of 0 means *never* where the field is a limit (``stall_shutdown_s``, ``deadlock_s``,
    ``heartbeat_s``). ``store``, ``job_key_file`` and ``job_id`` are None in a process that no
    launcher started.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    hostname: str
    store: str | None
    job_key_file: str | None
    job_id: str | None
    fusion_threshold_bytes: int
    cycle_time_ms: float
    cache_capacity: int
    stall_check_enabled: bool
    stall_warning_s: float
    stall_shutdown_s: float
    deadlock_s: float
    heartbeat_s: float
    start_timeout_s: float
    log_level: str
    log_hide_time: bool
    simd: str
    shm_stores: str
    join_all_ops: bool
    disable_group_fusion: bool
    dynamic_process_sets: bool
    elastic: bool
    timeline: str | None
    timeline_mark_cycles: bool
    controller: str
    cpu_operations: str


def truth(text: str) -> bool:
    """The boolean rule of the environment: true if the text is an integer above 0.

    ``"true"`` and ``"yes"`` are therefore false, as they have always been.
    """
    try:
        return int(text) > 0
    except ValueError:
        return False


def parse(knob: Knob, text: str, source: str) -> object:
    """Turns the text of a variable into the value of ``knob``, in the variable's unit.

    Raises:
        ValueError: naming ``source``, the text, and what is accepted.
    """
    kind = knob.env_kind or knob.kind
    if kind in ("switch", "flag"):
        return truth(text)
    if kind == "nonzero":
        try:
            return int(text) != 0
        except ValueError:
            return False
    if kind == "choice":
        word = text.strip().lower()
        if word in knob.choices:
            return word
        if knob.lenient:
            return knob.default
        raise ValueError(f"{source}={text}: one of {', '.join(knob.choices)} is accepted")
    if kind in ("int", "float"):
        return _number(knob, kind, text, source)
    return text


def _number(knob: Knob, kind: str, text: str, source: str) -> int | float:
    try:
        value: int | float = int(text) if kind == "int" else float(text)
    except ValueError:
        value = math.nan
    return check_range(knob, value, f"{source}={text}", kind)


def check_range(knob: Knob, value: int | float, what: str, kind: str | None = None) -> int | float:
    """Returns ``value`` if it is a number within the limits of ``knob``.

    Raises:
        ValueError: beginning with ``what`` and saying what is accepted.
    """
    low, high = knob.minimum, knob.maximum
    above = low is None or value >= low
    finite = isinstance(value, int) or math.isfinite(value)  # an int may be too large for isfinite
    if finite and above and (high is None or value <= high):
        return value
    raise ValueError(f"{what}: {_numbers(knob, kind or knob.kind)} is accepted")


def check_option(knob: Knob, value: int | float, what: str) -> int | float:
    """Like :func:`check_range`, for a number in the unit of the option and the YAML key."""
    if knob.maximum is not None and knob.env_scale != 1:
        knob = replace(knob, maximum=knob.maximum // knob.env_scale)
    return check_range(knob, value, what)


def _numbers(knob: Knob, kind: str) -> str:
    """The numbers that ``knob`` accepts, in words."""
    noun = "an integer" if kind == "int" else "a number"
    if knob.minimum is None:
        return noun
    if knob.maximum is None:
        return f"{noun} >= {knob.minimum}"
    return f"{noun} from {knob.minimum} to {knob.maximum}"


def from_environ(environ: Mapping[str, str] = os.environ) -> Settings:
    """Reads the variables of a worker, or the defaults of a process on its own.

    Raises:
        ValueError: naming the variable, its text and what is accepted.
    """
    values: dict[str, object] = {}
    for knob in KNOBS:
        if not knob.setting:
            continue
        text = environ.get(knob.env, "")
        value = parse(knob, text, knob.env) if text else knob.default
        values[knob.setting] = (not value) if knob.negated else value
    settings = Settings(**values)  # type: ignore[arg-type]  # a test compares rows with fields
    for part in ("", "local_", "cross_"):
        rank, size = getattr(settings, f"{part}rank"), getattr(settings, f"{part}size")
        if rank >= size:
            name = f"HOROVOD_{part.upper()}"
            raise ValueError(f"{name}RANK={rank} must be below {name}SIZE={size}")
    return settings


def foreign_launcher(environ: Mapping[str, str] = os.environ) -> str | None:
    """Says what to do if another starter made several processes, else returns None.

    Such processes know nothing of each other here: each would train on its own in silence.
    """
    if "HOROVOD_STORE" in environ or ("HOROVOD_RANK" in environ and "HOROVOD_SIZE" in environ):
        return None
    for name, starter in _FOREIGN_SIZES:
        try:
            count = int(environ.get(name, ""))
        except ValueError:
            continue
        if count > 1:
            return (
                f"{name}={count}: this process seems to be one of {count} started by {starter}, "
                f"which horovod does not understand; each of them would train alone. Start them "
                f"with `horovodrun -np {count} python train.py` instead, or unset {name} if this "
                f"process is meant to be on its own"
            )
    return None


def inherited_environment() -> dict[bytes, bytes]:
    """A copy of this process's environment, byte for byte, to be handed on to workers."""
    return dict(os.environb)


def in_lsf() -> bool:
    """Whether LSF started this process, which knows how many processes are wanted."""
    return "LSB_JOBID" in os.environ


def helper_environment() -> dict[bytes, bytes]:
    """The little that a helper process of the launcher's own needs; nothing that marks a job."""
    kept = (b"PATH", b"LD_LIBRARY_PATH")
    return {name: os.environb[name] for name in kept if name in os.environb}


def exports(
    given: Mapping[str, object], from_file: Iterable[str], environ: Mapping[bytes, bytes]
) -> dict[bytes, bytes]:
    """The variables that stand for options given by flag or file.

    Args:
        given: knob name to value, for every option that was given at all.
        from_file: the names in ``given`` that come from the configuration file; a variable that is
            already in ``environ`` wins over these.
        environ: the environment that is handed on.

    Returns:
        Only what has to be added or replaced.
    """
    weak = frozenset(from_file)
    result: dict[bytes, bytes] = {}
    for knob in KNOBS:
        value = given.get(knob.name)
        if value is None or not knob.env or not knob.exported:
            continue
        if knob.needs and not given.get(knob.needs):
            continue
        name = knob.env.encode()
        if not (knob.name in weak and environ.get(name)):
            result[name] = os.fsencode(env_text(knob, value))
    return result


def env_text(knob: Knob, value: object) -> str:
    """The text under which ``value``, given by flag or file, is exported."""
    if knob.kind in ("switch", "flag"):
        return "1" if bool(value) != knob.inverse else "0"
    if knob.kind == "int" and isinstance(value, int):
        return str(value * knob.env_scale)
    return str(value)


def effective(
    given: Mapping[str, object], from_file: Iterable[str], environ: Mapping[bytes, bytes]
) -> list[tuple[str, str, str]]:
    """What a worker will see: (variable, text, where it comes from), for ``--verbose``."""
    weak = frozenset(from_file)
    exported = exports(given, weak, environ)
    rows: list[tuple[str, str, str]] = []
    for knob in KNOBS:
        if not knob.env or not knob.tunable:
            continue
        name = knob.env.encode()
        if name in exported:
            source = f"file: {knob.yaml}" if knob.name in weak else f"flag {knob.flag}"
            rows.append((knob.env, os.fsdecode(exported[name]), source))
        elif environ.get(name):
            rows.append((knob.env, os.fsdecode(environ[name]), "environment"))
        elif knob.effect is Effect.WORKS:
            default = knob.default
            text = "" if default is None else str(int(default) if default is True else default)
            rows.append((knob.env, "0" if default is False else text, "default"))
    return rows


def without_effect(
    given: Mapping[str, object], from_file: Iterable[str], environ: Mapping[bytes, bytes]
) -> list[str]:
    """Names, as the user wrote them, of what was asked for and does nothing yet."""
    weak = frozenset(from_file)
    names: list[str] = []
    for knob in KNOBS:
        if knob.effect is not Effect.NONE:
            continue
        value = given.get(knob.name)
        if value is not None and value is not False and value != set():
            names.append(knob.yaml if knob.name in weak else knob.flag)
            continue
        text = environ.get(knob.env.encode(), b"") if knob.env and knob.tunable else b""
        if text and _asks_for_something(knob, os.fsdecode(text)):
            names.append(knob.env)
    return names


def _asks_for_something(knob: Knob, text: str) -> bool:
    try:
        return parse(knob, text, knob.env) not in (knob.default, False)
    except ValueError:
        return True


def documentation() -> str:
    """The text of ``docs/configuration.md``."""
    head = (
        "# Configuration\n\n"
        "Generated by `python -m horovod.common.config`; a test compares it with the table in the\n"
        "source. A flag wins over the environment, the environment over the configuration file\n"
        "(`--config-file`, YAML), the file over the default; `horovodrun --verbose` shows what\n"
        "each worker gets and where it comes from.\n\n"
        "*Values* are those of the variable, or of the flag where there is none. A switch in the\n"
        "environment is on if its text is an integer above 0 (where *Values* says so: any integer\n"
        "but 0); in the file it is `true` or `false`. A word has any case in the variable and\n"
        "the file; after a flag it is in capitals. A number that can't be read is an error that\n"
        "names the variable.\n\n"
        "*No effect yet* means: accepted, with one warning from `horovodrun`; *not needed* means:\n"
        "accepted, and what it asks for holds without it; *refused* means that `horovodrun` says\n"
        "so and ends with status 2.\n"
    )
    parts = [head]
    for group in dict.fromkeys(knob.group for knob in KNOBS):
        parts.append(f"\n## {group}\n\n")
        parts.append("| Flag | Variable | YAML key | Values | Default | Effect | Meaning |\n")
        parts.append("|---|---|---|---|---|---|---|\n")
        parts += [_documentation_row(knob) for knob in KNOBS if knob.group == group]
    return "".join(parts)


def _documentation_row(knob: Knob) -> str:
    default = "" if knob.default is None else f"`{_default_text(knob)}`"
    cells = (
        _code(knob.flags + knob.off_flags),
        _code([knob.env]),
        _code([knob.yaml]),
        _values(knob),
        default,
        knob.effect.value,
        knob.help,
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _code(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words if word)


def _values(knob: Knob) -> str:
    """What is accepted, for the documentation; empty for a flag that takes nothing."""
    kind = knob.env_kind or knob.kind
    if knob.effect is Effect.IGNORED:
        return ""
    if kind == "choice":
        return _code(knob.choices) + ("; any other is the default" if knob.lenient else "")
    if kind == "nonzero":
        return "`0`, `1`; on if not 0"
    if kind in ("switch", "flag"):
        return "`0`, `1`" if knob.env else ""
    if kind in ("int", "float"):
        return _numbers(knob, kind)
    return {"names": "names", "pair": "two integers"}.get(kind, "text")


def _default_text(knob: Knob) -> object:
    """As it would be written in the variable."""
    if isinstance(knob.default, bool) and knob.env:
        return int(knob.default)
    return knob.default


def setting_names() -> set[str]:
    """The names of the fields of :class:`Settings`, for the test that compares them with rows."""
    return {field.name for field in fields(Settings)}


if __name__ == "__main__":
    sys.stdout.write(documentation())
