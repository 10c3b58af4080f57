"""The distribution's root: its version and the launcher function; must not import a framework.

``import horovod`` is cheap on purpose: ``horovod.run`` loads the launcher when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from horovod.runner import run as run

__version__ = "1.0.0.dev0"

__all__ = ["__version__", "run"]


def __getattr__(name: str) -> Any:
    if name == "run":
        from horovod.runner import run

        globals()["run"] = run
        return run
    raise AttributeError(f"module 'horovod' has no attribute {name!r}")
