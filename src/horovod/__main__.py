"""The command ``horovod``, also ``python -m horovod``: which subcommand; knows nothing of any."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import horovod


def _run(argv: Sequence[str]) -> int:
    from horovod.runner.launch import run_commandline

    return run_commandline(argv)


def _bench(argv: Sequence[str]) -> int:
    from horovod.bench.command import run_commandline

    return run_commandline(argv)


_COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "run": (_run, "start a program in several processes, as horovodrun does"),
    "bench": (_bench, "measure allreduce on this machine against what its memory allows"),
}
_USAGE = "\n".join(
    [
        "usage: horovod COMMAND [argument ...]; horovod COMMAND --help",
        *(f"  {name:<7} {text}" for name, (_, text) in _COMMANDS.items()),
    ]
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand and returns its exit status; 2 if there is no such one."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] in (["-h"], ["--help"]):
        print(_USAGE)
        return 0
    if words[:1] in (["-v"], ["--version"]):
        print(horovod.__version__)
        return 0
    if not words or words[0] not in _COMMANDS:
        print(_USAGE, file=sys.stderr)
        return 2
    return _COMMANDS[words[0]][0](words[1:])


if __name__ == "__main__":
    sys.exit(main())
