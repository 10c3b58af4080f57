"""The launcher as a function, :func:`run`; must not import a framework or the engine.

What it needs is imported when it is called, so that ``import horovod.runner`` costs nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

__all__ = ["run"]


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: int | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: bool | int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: Iterable[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Calls ``func(*args, **kwargs)`` in ``num_proc`` new processes and returns their results.

    Function, arguments and results may be anything that cloudpickle takes, also lambdas, closures
    and classes of ``__main__``, of any size. Blocks until every process has ended; nothing of them
    is left then. What the processes write is forwarded as by ``horovodrun``.

    Args:
        func: what each process calls; it may call ``init()`` of a framework's module, or not.
        args: positional arguments.
        kwargs: keyword arguments.
        num_proc: number of processes.
        min_num_proc: makes the job elastic, which is not supported yet.
        max_num_proc: most processes of an elastic job.
        slots: slots of a discovered host that names none.
        reset_limit: resets after which an elastic job stops.
        cooldown_range: seconds, from and to, that a failed host is left alone.
        hosts: ``host1:2,host2:4``; only names of this machine for now.
        hostfile: file with one host a line; not together with ``hosts``.
        host_discovery_script: makes the job elastic, which is not supported yet.
        start_timeout: seconds until all processes must have found each other.
        ssh_port: port of sshd on remote hosts.
        ssh_identity_file: private key for ssh.
        disable_cache: repeat start-up checks.
        output_filename: directory in which each rank's output is also written.
        verbose: say what is done and which settings hold.
        use_gloo: use horovod's own controller, the default.
        use_mpi: not supported.
        mpi_args: further arguments for mpirun.
        network_interface: deprecated: comma-separated ``network_interfaces``.
        network_interfaces: network interfaces to use.
        executable: Python interpreter of the processes; this one's if not given.
        np: deprecated: ``num_proc``.
        min_np: deprecated: ``min_num_proc``.
        max_np: deprecated: ``max_num_proc``.

    Returns:
        The results by rank. One that ended by ``sys.exit(0)`` gave None.

    Raises:
        RuntimeError: a process failed; the text names the rank that failed first and has the
            traceback of its exception.
        ValueError: the arguments don't fit together, or ask for what is not supported.
    """
    for old, new, value in (
        ("np", "num_proc", np),
        ("min_np", "min_num_proc", min_np),
        ("max_np", "max_num_proc", max_np),
        ("network_interface", "network_interfaces", network_interface),
    ):
        if value is not None:
            warnings.warn(f"{old} is deprecated: use {new}", DeprecationWarning, stacklevel=2)
    if hosts is not None and hostfile is not None:
        raise ValueError("give hosts or hostfile, not both")
    if use_gloo and use_mpi:
        raise ValueError("give use_gloo or use_mpi, not both")
    nics = set(network_interfaces or ())
    if network_interface is not None:
        nics |= {name.strip() for name in network_interface.split(",")}

    from horovod.runner import function

    options = {
        "num_proc": num_proc if np is None else np,
        "min_num_proc": min_num_proc if min_np is None else min_np,
        "max_num_proc": max_num_proc if max_np is None else max_np,
        "slots": slots,
        "reset_limit": reset_limit,
        "cooldown_range": cooldown_range,
        "hosts": hosts,
        "hostfile": hostfile,
        "host_discovery_script": host_discovery_script,
        "start_timeout": start_timeout,
        "ssh_port": ssh_port,
        "ssh_identity_file": ssh_identity_file,
        "disable_cache": disable_cache,
        "output_filename": output_filename,
        "verbose": verbose,
        "use_gloo": use_gloo,
        "use_mpi": use_mpi,
        "mpi_args": mpi_args,
        "nics": nics or None,
    }
    return function.run(func, args, kwargs or {}, options, executable)
