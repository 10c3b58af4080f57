"""The command ``horovodrun``: options to a job; knows no process and no store."""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import socket
import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import horovod
from horovod.common import config
from horovod.common.config import KNOBS, Effect, Knob
from horovod.runner import hosts, placement
from horovod.runner.driver import JobSpec, Outcome, run_job
from horovod.runner.hosts import Host, Slot

_REFUSED = 2
_TYPES = {"int": int, "float": float}


class UsageError(ValueError):
    """What was asked for is wrong or not there yet; the text is one line."""


class _Names(argparse.Action):
    """Collects comma-separated names of all uses of the option into one set."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        names = {name.strip() for name in str(values).split(",") if name.strip()}
        if option_string == "--network-interface" and len(names) > 1:
            warnings.warn(
                "a list in --network-interface is deprecated: use --network-interfaces",
                DeprecationWarning,
                stacklevel=2,
            )
        setattr(namespace, self.dest, (getattr(namespace, self.dest) or set()) | names)


def make_parser() -> argparse.ArgumentParser:
    """The parser, made from the table of knobs."""
    parser = argparse.ArgumentParser(
        prog="horovodrun",
        description="Starts a program in several processes that train together.",
        usage="%(prog)s -np N [options] command [argument ...]",
    )
    parser.add_argument("-v", "--version", action="version", version=horovod.__version__)
    add_options(parser)
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, help="what to start, with its arguments"
    )
    return parser


def add_options(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    """Adds the options of the table of knobs, in their groups, but for those named."""
    groups: dict[str, Any] = {}
    exclusive: dict[str, Any] = {}
    for knob in KNOBS:
        if not knob.flags or knob.name in without:
            continue
        if knob.group not in groups:
            groups[knob.group] = parser.add_argument_group(knob.group)
        target = groups[knob.group]
        if knob.exclusive:
            if knob.exclusive not in exclusive:
                exclusive[knob.exclusive] = target.add_mutually_exclusive_group()
            target = exclusive[knob.exclusive]
        _add_option(target, knob)
    parser.set_defaults(run_func=None, executable=None)


def _add_option(target: Any, knob: Knob) -> None:
    note = "" if knob.effect is Effect.WORKS else f" ({knob.effect.value})"
    text = (knob.help + note).replace("%", "%%")
    if knob.kind == "flag":
        target.add_argument(*knob.flags, dest=knob.name, action="store_true", help=text)
    elif knob.kind == "switch":
        for flags, value, shown in (
            (knob.flags, knob.on, text),
            (knob.off_flags, not knob.on, argparse.SUPPRESS),
        ):
            target.add_argument(
                *flags, dest=knob.name, action="store_const", const=value, default=None, help=shown
            )
    elif knob.kind == "names":
        target.add_argument(
            *knob.flags, dest=knob.name, action=_Names, metavar=knob.metavar, help=text
        )
    elif knob.kind == "pair":
        target.add_argument(
            *knob.flags, dest=knob.name, nargs=2, type=int, metavar=("MIN", "MAX"), help=text
        )
    elif knob.kind == "choice":
        choices = [word.upper() for word in knob.choices]
        target.add_argument(*knob.flags, dest=knob.name, choices=choices, help=text)
    else:
        target.add_argument(
            *knob.flags,
            dest=knob.name,
            type=_TYPES.get(knob.kind, str),
            metavar=knob.metavar or ("N" if knob.kind in _TYPES else "TEXT"),
            help=text,
        )


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses a command line, without the program's name, and the configuration file it names.

    The namespace also has ``from_file``, the names of the attributes that the file set.

    Raises:
        ValueError: a number is out of range, or the configuration file is wrong.
        SystemExit: the command line can't be understood (status 2), or help was asked for.
    """
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.command[:1] == ["--"]:
        del args.command[0]
    if args.num_proc is None and not args.check_build and not config.in_lsf():
        parser.error("the number of processes is missing: give -np N")
    finish_args(args)
    return args


def finish_args(args: argparse.Namespace) -> None:
    """Checks what was parsed, and adds what the configuration file says.

    Raises:
        ValueError: a number is out of range, or the configuration file is wrong.
    """
    check_numbers(args)
    args.from_file = frozenset()
    if args.config_file:
        _read_file(args)


def check_numbers(args: argparse.Namespace) -> None:
    """Raises ValueError if an option's number is out of range."""
    for knob in KNOBS:
        value = getattr(args, knob.name, None)
        if value is not None and knob.kind in _TYPES:
            config.check_option(knob, value, f"{knob.flag} {value}")


def _read_file(args: argparse.Namespace) -> None:
    """Sets what the configuration file says and the command line does not."""
    import yaml

    name = args.config_file
    try:
        with open(name, "rb") as file:
            content = yaml.safe_load(file)
    except OSError as error:
        raise UsageError(f"--config-file {name}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"--config-file {name}: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict | None):
        raise UsageError(f"--config-file {name}: it must hold sections with keys")
    content = content or {}
    unknown = _unknown_keys(content)
    if unknown:
        tell(f"warning: {name}: these keys are unknown and ignored: {', '.join(unknown)}")
    values = _file_values(content, name)
    controller = values.pop("controller", None)
    if controller is not None and not (args.use_gloo or args.use_mpi or args.use_jsrun):
        if controller not in ("gloo", "mpi"):
            raise ValueError(f"{name}: controller: {controller}: gloo or mpi is accepted")
        values["use_gloo"], values["use_mpi"] = controller == "gloo", controller == "mpi"
    taken = set()
    for key, value in values.items():
        given = getattr(args, key)
        if given is None or (given is False and key in ("use_gloo", "use_mpi")):
            setattr(args, key, value)
            taken.add(key)
    args.from_file = frozenset(taken)


def _unknown_keys(content: Mapping[Any, Any]) -> list[str]:
    """The sections and keys that no row of the table has, such as those with a typing error."""
    known = {knob.yaml for knob in KNOBS if knob.yaml}
    sections = {key.partition(".")[0] for key in known}
    unknown: list[str] = []
    for section, entries in content.items():
        if section not in sections:
            unknown.append(str(section))
        elif isinstance(entries, dict):
            names = (f"{section}.{key}" for key in entries)
            unknown += [name for name in names if name not in known]
    return unknown


def _file_values(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The known keys of a configuration file, checked; unknown ones are ignored."""
    values: dict[str, Any] = {}
    for knob in KNOBS:
        section, _, key = knob.yaml.partition(".")
        if not section or section not in content:
            continue
        if not key:
            values[knob.name] = content[section]
            continue
        entries = content[section] if content[section] is not None else {}
        if not isinstance(entries, dict):
            raise UsageError(f"{name}: {section} must hold keys")
        value = entries.get(key)
        if value is None and key == "enabled":  # a section that is there has a say
            value = knob.negated
        if value is not None:
            value = _file_value(knob, value, f"{name}: {knob.yaml}: {value}")
            values[knob.name] = (not value) if knob.negated else value
    return values


def _file_value(knob: Knob, value: object, what: str) -> object:
    if knob.kind in _TYPES:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{what}: a number is accepted")
        config.check_option(knob, value, what)  # first: no other type may hold it
        if knob.kind == "int" and value != int(value):
            raise ValueError(f"{what}: an integer is accepted")
        return _TYPES[knob.kind](value)
    if knob.kind == "switch":
        if not isinstance(value, bool):
            raise ValueError(f"{what}: true or false is accepted")
        return value
    text = str(value)
    if knob.kind == "choice":
        if text.lower() not in knob.choices:
            raise ValueError(f"{what}: one of {', '.join(knob.choices)} is accepted")
        return text.upper()
    return text


def check_build() -> str:
    """What is available, laid out as ``--check-build`` always has."""

    def rows(entries: Mapping[str, bool]) -> str:
        return "\n".join(f"    [{'X' if there else ' '}] {name}" for name, there in entries.items())

    def framework(name: str, adapter: str) -> bool:
        has_adapter = (Path(horovod.__file__).parent / adapter / "__init__.py").exists()
        return has_adapter and importlib.util.find_spec(name) is not None

    return (
        f"Horovod v{horovod.__version__}:\n\n"
        "Available Frameworks:\n"
        + rows(
            {
                "TensorFlow": framework("tensorflow", "tensorflow"),
                "PyTorch": framework("torch", "torch"),
                "MXNet": False,
            }
        )
        + "\n\nAvailable Controllers:\n"
        + rows({"MPI": False, "Gloo": True})
        + "\n\nAvailable Tensor Operations:\n"
        + rows({"NCCL": False, "DDL": False, "CCL": False, "MPI": False, "Gloo": True})
        + "    \n"
    )


def named_hosts(args: argparse.Namespace) -> list[Host] | None:
    """What ``--hosts`` or ``--hostfile`` says, None if neither was given.

    Raises:
        ValueError: they can't be read.
    """
    if args.hosts is not None and args.hostfile is not None:
        raise UsageError("give hosts or a hostfile, not both")
    if args.hosts is not None:
        return hosts.parse_hosts(args.hosts)
    if args.hostfile is not None:
        try:
            text = Path(args.hostfile).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--hostfile {args.hostfile}: {error}") from error
        return hosts.parse_hostfile(text, args.hostfile)
    return None


def place(args: argparse.Namespace) -> list[Slot]:
    """Reads ``--hosts`` or ``--hostfile`` and places the ranks.

    Raises:
        ValueError: the hosts can't be read, are too few, or are not this machine.
    """
    if args.num_proc is None:
        raise UsageError("the number of processes is missing: give -np N")
    machines = named_hosts(args) or [Host("localhost", max(args.num_proc, 0))]
    remote = placement.remote_hosts(machines)
    if remote:
        raise UsageError(
            f"remote hosts are not supported yet: {', '.join(remote)} (this machine is "
            f"{socket.gethostname()} or localhost)"
        )
    return hosts.assign(machines, args.num_proc)


def check_supported(args: argparse.Namespace, environment: Mapping[bytes, bytes]) -> None:
    """Refuses what would change the meaning of the run if it were ignored.

    Raises:
        UsageError: naming the option or variable.
    """
    for knob in KNOBS:
        value = getattr(args, knob.name, None)
        if knob.effect is Effect.REFUSED and value not in (None, False):
            by_file = knob.name in args.from_file  # of these, only the controller has a key
            name = f"controller: mpi in {args.config_file}" if by_file else knob.flag
            raise UsageError(f"{name}: {knob.refusal}")
        if knob.name in ("controller", "cpu_operations"):
            text = os.fsdecode(environment.get(knob.env.encode(), b""))
            if text:
                try:
                    config.parse(knob, text, knob.env)
                except ValueError:
                    raise UsageError(
                        f"{knob.env}={text}: only gloo is supported; unset the variable"
                    ) from None


def job_spec(args: argparse.Namespace, argv: Sequence[bytes], foreground: bool) -> JobSpec:
    """What the options mean.

    Raises:
        ValueError: in one line, what is wrong or not there yet.
    """
    inherited = config.inherited_environment()
    check_supported(args, inherited)
    slots = place(args)
    given = {knob.name: getattr(args, knob.name, None) for knob in KNOBS}
    environment = {**inherited, **config.exports(given, args.from_file, inherited)}
    for knob in KNOBS:  # before anything starts, and in one place
        text = environment.get(knob.env.encode(), b"") if knob.env and knob.tunable else b""
        if text and knob.setting:
            config.parse(knob, os.fsdecode(text), knob.env)
    unused = config.without_effect(given, args.from_file, inherited)
    if unused:
        tell(f"warning: these have no effect yet: {', '.join(unused)}")
    threads = _threads(slots, environment)
    environment.update(threads)
    if args.verbose:
        _describe(args, slots, given, threads)
    return JobSpec(
        slots=slots,
        argv=argv,
        environment=environment,
        output_directory=Path(args.output_filename) if args.output_filename else None,
        timestamps=bool(args.prefix_output_with_timestamp),
        foreground=foreground,
    )


def _threads(slots: Sequence[Slot], environment: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """One thread pool of all cores in each of several ranks would make them wait for each other."""
    ranks = max(slot.local_size for slot in slots)
    if environment.get(b"OMP_NUM_THREADS") or ranks < 2:
        return {}
    return {b"OMP_NUM_THREADS": str(max(1, placement.usable_cores() // ranks)).encode()}


def _describe(
    args: argparse.Namespace,
    slots: Sequence[Slot],
    given: Mapping[str, object],
    threads: Mapping[bytes, bytes],
) -> None:
    """Says on stdout, for ``--verbose``, where ranks go and which settings hold."""
    names = dict.fromkeys(slot.hostname for slot in slots)
    lines = [
        "Remote host found: ",
        "All hosts are local, finding the interfaces with address 127.0.0.1",
        "Local interface found lo",
        *(
            f"horovodrun: ranks {', '.join(str(s.rank) for s in slots if s.hostname == name)} "
            f"on {name}"
            for name in names
        ),
    ]
    if threads:
        count = threads[b"OMP_NUM_THREADS"].decode()
        lines.append(f"horovodrun: OMP_NUM_THREADS={count} (cores of this machine / its ranks)")
    environment = config.inherited_environment()
    for variable, text, source in config.effective(given, args.from_file, environment):
        lines.append(f"horovodrun: {variable}={text} ({source})")
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def tell(text: str) -> None:
    """Writes a line of the launcher's to stderr."""
    sys.stderr.write(f"horovodrun: {text}\n")
    sys.stderr.flush()


def prepare_process() -> None:
    """Makes this process fit to be a launcher, whatever it was started with."""
    _open_standard_descriptors()
    # A parent that ignores the ends of its children must not make us blind to ours.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _open_standard_descriptors() -> None:
    """Opens those of 0, 1 and 2 that are closed, so that nothing else gets their numbers.

    What is written to a stream that was closed is dropped.
    """
    null = os.open(os.devnull, os.O_RDWR)
    while null <= 2:
        os.set_inheritable(null, True)
        null = os.open(os.devnull, os.O_RDWR)
    os.close(null)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


def run_commandline(argv: Sequence[str] | None = None) -> int:
    """Runs ``horovodrun`` and returns its exit status.

    0 if every rank ended with 0; else the status of the rank that failed first, 128 + n for
    signal n; 2 for what can't be understood or isn't supported; 126 and 127 as a shell has them.
    """
    prepare_process()
    try:
        args = parse_args(argv)
        if args.check_build:
            sys.stdout.write(("\n" if args.verbose else "") + check_build())
            return 0
        if not args.command:
            raise UsageError("the command to start is missing")
        spec = job_spec(args, [os.fsencode(word) for word in args.command], foreground=True)
    except ValueError as error:
        return refused(error)
    return status_of(lambda: run_job(spec))


def refused(error: ValueError) -> int:
    """Says what is wrong with a command line; returns the exit status."""
    tell(str(error))
    return _REFUSED


def status_of(job: Callable[[], Outcome]) -> int:
    """Runs a job in the foreground and returns the exit status of the launcher."""
    try:
        outcome = job()
    except placement.LaunchError as error:
        tell(str(error))
        return error.code
    except OSError as error:
        tell(str(error))
        return 1
    except KeyboardInterrupt:  # it came before there was anything to end
        return 128 + signal.SIGINT
    return outcome.code


if __name__ == "__main__":
    sys.exit(run_commandline())
