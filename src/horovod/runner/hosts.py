"""Host strings, host files and who gets which rank; pure: no file, no resolver, no process."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# A leading dash would be an option for ssh.
_NAME = re.compile(r"[\w.][\w.-]*", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,6}", re.ASCII)
_WORDS = ("slots", "max_slots", "max-slots")


@dataclass(frozen=True)
class Host:
    """A machine, by the name it was given, and how many processes it takes."""

    name: str
    slots: int


@dataclass(frozen=True)
class Slot:
    """The place of one rank."""

    hostname: str
    rank: int
    local_rank: int
    cross_rank: int
    size: int
    local_size: int
    cross_size: int

    def variables(self) -> dict[bytes, bytes]:
        """The variables that tell a worker its place, all seven."""
        values = {
            "HOSTNAME": self.hostname,
            "RANK": self.rank,
            "SIZE": self.size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_SIZE": self.local_size,
            "CROSS_RANK": self.cross_rank,
            "CROSS_SIZE": self.cross_size,
        }
        return {f"HOROVOD_{name}".encode(): str(value).encode() for name, value in values.items()}


def parse_hosts(text: str) -> list[Host]:
    """Reads ``host1:2,host2:4``; a name without slots has one, and IPv6 goes into brackets.

    A name that comes again adds to its slots, at its first place.

    Raises:
        ValueError: naming the item and what is wrong with it.
    """
    hosts = []
    for item in text.split(","):
        try:
            hosts.append(_host(item.strip()))
        except ValueError as error:
            raise ValueError(f"hosts {text!r}: {error}") from None
    return _merged(hosts)


def parse_hostfile(text: str, name: str = "hostfile") -> list[Host]:
    """Reads one host a line: ``name``, ``name:2`` or ``name slots=2``, with ``#`` comments.

    ``max_slots`` is accepted and means nothing more than ``slots`` does here: no host gets more
    processes than it has slots.

    Raises:
        ValueError: naming the file, the line number, and the reason.
    """
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        words = re.sub(r"\s*=\s*", "=", line.partition("#")[0].strip()).split()
        if not words:
            continue
        try:
            hosts.append(_host(words[0], words[1:]))
        except ValueError as error:
            raise ValueError(f"{name}, line {number}: {error}") from None
    if not hosts:
        raise ValueError(f"{name}: no host in it")
    return _merged(hosts)


def _host(text: str, columns: Sequence[str] = ()) -> Host:
    name, slots = _split(text)
    for column in columns:
        key, equals, value = column.partition("=")
        if not equals or key not in _WORDS:
            raise ValueError(f"{column!r} is not understood; write slots=N")
        count = _count(value, key)
        if key == "slots":
            if slots is not None:
                raise ValueError("the number of slots is given twice")
            slots = count
    return Host(name, 1 if slots is None else slots)


def _split(text: str) -> tuple[str, int | None]:
    """The name and the number behind the colon, if there is one."""
    if not text:
        raise ValueError("a host's name is missing")
    if text.startswith("["):
        name, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError(f"{text!r} should look like [::1]:2")
        if not _is_ipv6(name):
            raise ValueError(f"{name!r} is not an IPv6 address")
        return name, _count(rest[1:], "slots") if rest else None
    if text.count(":") > 1:
        if not _is_ipv6(text):
            raise ValueError(f"{text!r} has several colons; an IPv6 address goes into brackets")
        return text, None
    name, colon, number = text.partition(":")
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a host's name")
    return name, _count(number, "slots") if colon else None


def _is_ipv6(text: str) -> bool:
    try:
        socket.inet_pton(socket.AF_INET6, text.partition("%")[0])
    except (OSError, ValueError):
        return False
    return True


def _count(text: str, what: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"{text!r} is not a number of {what}")
    return int(text)


def _merged(hosts: Iterable[Host]) -> list[Host]:
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return [Host(name, count) for name, count in slots.items()]


def assign(hosts: Sequence[Host], size: int) -> list[Slot]:
    """Places ranks 0 to ``size`` - 1: hosts in the given order, each filled before the next.

    ``cross_rank`` counts, among the hosts that have the same local rank, those that come before.

    Raises:
        ValueError: there are fewer slots than processes.
    """
    available = sum(host.slots for host in hosts)
    if size < 1:
        raise ValueError(f"{size} processes can't be started; at least 1 is needed")
    if available < size:
        listed = ", ".join(f"{host.name}:{host.slots}" for host in hosts)
        raise ValueError(f"{size} processes need {size} slots, but {listed} has {available}")
    used: list[tuple[str, int]] = []
    left = size
    for host in hosts:
        count = min(host.slots, left)
        left -= count
        if count:
            used.append((host.name, count))
    slots: list[Slot] = []
    for index, (name, count) in enumerate(used):
        for local_rank in range(count):
            holders = [other for other, (_, slots_) in enumerate(used) if slots_ > local_rank]
            slots.append(
                Slot(
                    hostname=name,
                    rank=len(slots),
                    local_rank=local_rank,
                    cross_rank=holders.index(index),
                    size=size,
                    local_size=count,
                    cross_size=len(holders),
                )
            )
    return slots
