"""Every exception a user of the library can meet; knows nothing of the engine or any framework."""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """A collective failed, or the engine that ran it is gone.

    Elastic training treats it as recoverable. The subclasses below say why it was raised.

    Args:
        message: the text, or the exception this one stands for.
        rank: the rank that is to blame, if one is known.
        host: the host of that rank.
        op: the full name of the operation, for example ``allreduce.conv1.weight``.
        submitted: what each rank submitted, in words, where ranks disagreed.
    """

    def __init__(
        self,
        message: object = "",
        *,
        rank: int | None = None,
        host: str | None = None,
        op: str | None = None,
        submitted: str | None = None,
    ) -> None:
        super().__init__(str(message))
        self.rank = rank
        self.host = host
        self.op = op
        self.submitted = submitted


class MismatchError(HorovodInternalError):
    """Ranks disagree about an operation. Every member raises it; the engine stays usable."""


class PeerLostError(HorovodInternalError):
    """A peer died, froze or left. The engine is dead until ``shutdown()`` and ``init()``."""


class StallError(HorovodInternalError):
    """A rank never submitted an operation the others wait for, and a time limit ended the wait."""


class ShutdownError(HorovodInternalError):
    """The engine is not running: never started, shut down here, or shut down by another rank."""


class ForkedError(ShutdownError):
    """The process is a forked child of one that called ``init()``: it has no engine."""


class ResourceError(HorovodInternalError):
    """The machine refused memory, a file descriptor or a thread; the text says which."""


class HostsUpdatedInterrupt(RuntimeError):
    """The set of hosts changed; elastic training re-forms.

    Args:
        skip_sync: True if only removals happened, so no state needs to be sent.
    """

    def __init__(self, skip_sync: bool) -> None:
        super().__init__("the set of hosts changed")
        self.skip_sync = skip_sync


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """Says that framework ``name`` is not the version that the library was made for."""
    return (
        f"{name} {installed_version} is installed, but horovod was made for {name} {version}: "
        f"install one of the two again"
    )


class HorovodVersionMismatchError(ImportError):
    """A framework's version differs from the one the library was made for."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name = name
        self.version = version
        self.installed_version = installed_version
