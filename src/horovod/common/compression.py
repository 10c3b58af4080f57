"""What a compressor is; must not know any framework.

A compressor is anything with ``compress`` and ``decompress``, a class or an object. Each front end
brings casts for its own tensors; users bring what they like. One that remembers something about a
tensor from call to call, such as what it dropped, has ``bind`` besides.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

Tensor = TypeVar("Tensor")


class Compressor(Generic[Tensor]):
    """Makes a tensor smaller for the way between ranks; the base of every compressor."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Gives what travels, and whatever `decompress` needs besides.

        All ranks must arrive at one data type and shape.
        """
        raise NotImplementedError("a compressor defines compress(tensor) -> (tensor, context)")

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Gives the reduced tensor its original form; ``ctx`` is what `compress` gave."""
        raise NotImplementedError("a compressor defines decompress(tensor, context) -> tensor")


class NoneCompressor(Compressor[Any]):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, None]:
        """Gives the tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Gives the tensor itself."""
        return tensor


def bound(compression: Any, name: str) -> Any:
    """The compressor for the tensor of this name: ``compression.bind(name)``, or itself without.

    ``bind`` gives the same compressor each time it gets the same name. Whoever compresses tensors
    that recur binds first.
    """
    bind = getattr(compression, "bind", None)
    return compression if bind is None else bind(name)
