"""Host strings, host files and the assignment of ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod.runner.hosts import Host, Slot, assign, parse_hostfile, parse_hosts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("10.0.0.3:1", [("10.0.0.3", 1)]),
        ("a-b.c-d.example:2", [("a-b.c-d.example", 2)]),
        ("node_1:1", [("node_1", 1)]),
        (" a:1, b:1", [("a", 1), ("b", 1)]),
        ("a", [("a", 1)]),
        ("a,b", [("a", 1), ("b", 1)]),
        ("a:0", [("a", 0)]),
        ("[::1]:2", [("::1", 2)]),
        ("[::1]", [("::1", 1)]),
        ("::1", [("::1", 1)]),
        ("fe80::1%eth0", [("fe80::1%eth0", 1)]),
        ("a:1,b:2,a:3", [("a", 4), ("b", 2)]),
    ],
)
def test_host_strings(text: str, hosts: list[tuple[str, int]]) -> None:
    assert parse_hosts(text) == [Host(*host) for host in hosts]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "missing"),
        ("a:1,", "missing"),
        ("a:", "'' is not a number"),
        ("a:x", "'x' is not a number"),
        ("a:-1", "'-1' is not a number"),
        ("a:1.5", "'1.5' is not a number"),
        ("a:9999999", "not a number"),
        ("a b:1", "'a b' is not a host's name"),
        ("-oProxyCommand=x:1", "is not a host's name"),
        ("a;b:1", "is not a host's name"),
        ("a:1:2", "several colons"),
        ("[::1", "should look like"),
        ("[::1]2", "should look like"),
        ("[x]:2", "not an IPv6 address"),
        ("h\u00f6st:1", "is not a host's name"),
    ],
)
def test_bad_host_strings(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match="hosts ") as caught:
        parse_hosts(text)
    assert reason in str(caught.value)


def test_host_file() -> None:
    text = (
        "# a comment\n"
        "\r\n"
        "one slots=2\r\n"
        "two slots=2 max_slots=4  # both\n"
        "   three:3\n"
        "\tfour\n"
        "five slots = 5\n"
        "::1\n"
        "one slots=1"
    )
    expected = [("one", 3), ("two", 2), ("three", 3), ("four", 1), ("five", 5), ("::1", 1)]
    assert parse_hostfile(text) == [Host(*host) for host in expected]


@pytest.mark.parametrize(
    ("text", "place", "reason"),
    [
        ("a slots=x", "line 1", "'x' is not a number of slots"),
        ("a\n\nb slots", "line 3", "'slots' is not understood"),
        ("a:2 slots=2", "line 1", "given twice"),
        ("a\nb cores=2", "line 2", "'cores=2' is not understood"),
        ("a max_slots=", "line 1", "'' is not a number of max_slots"),
        ("# nothing\n", "hosts.txt", "no host"),
        ("a b", "line 1", "'b' is not understood"),
    ],
)
def test_bad_host_files(text: str, place: str, reason: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_hostfile(text, "hosts.txt")
    assert str(caught.value).startswith("hosts.txt")
    assert place in str(caught.value)
    assert reason in str(caught.value)


def test_ranks_of_uneven_hosts() -> None:
    slots = assign([Host("h0", 1), Host("h1", 2)], 3)
    found = [(s.hostname, s.rank, s.local_rank, s.cross_rank, s.cross_size) for s in slots]
    assert found == [("h0", 0, 0, 0, 2), ("h1", 1, 0, 1, 2), ("h1", 2, 1, 0, 1)]


def test_only_as_many_ranks_as_asked_for() -> None:
    assert [s.hostname for s in assign([Host("localhost", 4)], 2)] == ["localhost"] * 2
    assert [s.local_size for s in assign([Host("a", 1), Host("b", 4)], 2)] == [1, 1]


@pytest.mark.parametrize(("hosts", "size"), [([Host("a", 1)], 2), ([], 1), ([Host("a", 1)], 0)])
def test_what_does_not_fit(hosts: list[Host], size: int) -> None:
    with pytest.raises(ValueError, match=str(size)):
        assign(hosts, size)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.data())
def test_every_assignment_is_a_grid(counts: list[int], data: st.DataObject) -> None:
    total = sum(counts)
    if not total:
        return
    size = data.draw(st.integers(1, total))
    slots = assign([Host(f"h{i}", count) for i, count in enumerate(counts)], size)
    assert [slot.rank for slot in slots] == list(range(size))
    assert all(slot.size == size for slot in slots)

    def groups(key: str) -> dict[object, list[Slot]]:
        found: dict[object, list[Slot]] = {}
        for slot in slots:
            found.setdefault(getattr(slot, key), []).append(slot)
        return found

    for members in groups("hostname").values():
        assert [s.local_rank for s in members] == list(range(len(members)))
        assert {s.local_size for s in members} == {len(members)}
    for members in groups("local_rank").values():
        assert [s.cross_rank for s in members] == list(range(len(members)))
        assert {s.cross_size for s in members} == {len(members)}


def test_all_seven_variables() -> None:
    slot = assign([Host("localhost", 2)], 2)[1]
    assert slot.variables() == {
        b"HOROVOD_HOSTNAME": b"localhost",
        b"HOROVOD_RANK": b"1",
        b"HOROVOD_SIZE": b"2",
        b"HOROVOD_LOCAL_RANK": b"1",
        b"HOROVOD_LOCAL_SIZE": b"2",
        b"HOROVOD_CROSS_RANK": b"0",
        b"HOROVOD_CROSS_SIZE": b"1",
    }
