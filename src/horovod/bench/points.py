"""What is measured: sizes and the gradients of known models; knows no clock and no library."""

from __future__ import annotations

from collections.abc import Callable

SIZES_BYTES = (4, 16 << 10, 256 << 10, 1 << 20, 16 << 20, 64 << 20)
"""Sizes of a single tensor."""


def size_text(size_bytes: int) -> str:
    """``16 KiB``, ``1 MiB``; in bytes what isn't a multiple of either."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size_bytes % unit == 0:
            return f"{size_bytes // unit} {name}"
    return f"{size_bytes} B"


def resnet50() -> list[int]:
    """Elements of each parameter of ResNet-50, in the order of its parameters."""
    counts, channels = [64 * 3 * 7 * 7, 64, 64], 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            counts += [width * channels, width, width, width * width * 9, width, width]
            counts += [width * width * 4, width * 4, width * 4]
            if block == 0:
                counts += [width * 4 * channels, width * 4, width * 4]
            channels = width * 4
    return [*counts, 1000 * 2048, 1000]


def bert_base() -> list[int]:
    """Elements of each parameter of BERT-base (uncased), in the order of its parameters."""
    hidden, inner = 768, 3072
    counts = [30522 * hidden, 512 * hidden, 2 * hidden, hidden, hidden]
    for _ in range(12):
        counts += [hidden * hidden, hidden] * 4 + [hidden, hidden]
        counts += [inner * hidden, inner, hidden * inner, hidden, hidden, hidden]
    return [*counts, hidden * hidden, hidden]


MODELS: dict[str, Callable[[], list[int]]] = {"resnet50": resnet50, "bert-base": bert_base}
"""By name, the elements of each parameter of a model, all of float32."""
