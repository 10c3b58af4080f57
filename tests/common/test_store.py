"""The store over its real socket: values, rounds, strangers, and what it leaves behind."""

from __future__ import annotations

import logging
import os
import pickle
import resource
import socket
import stat
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from horovod.common import proof, sockets
from horovod.common.store import (
    RankEnded,
    StoreClient,
    StoreError,
    StoreServer,
    StoreTimeout,
    make_job,
    read_key,
)


@pytest.fixture
def client(job, server):
    """Makes a client of a rank; all are closed at the end."""
    with ExitStack() as stack:

        def make(rank: int = 0) -> StoreClient:
            client = StoreClient(server.address, job.key, job.job_id, rank)
            stack.callback(client.close)
            return client

        yield make


def threads_of(function, arguments):
    """Calls ``function`` with each tuple of arguments in a thread of its own; results in order."""
    with ThreadPoolExecutor(len(arguments)) as pool:
        return [f.result() for f in [pool.submit(function, *a) for a in arguments]]


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# --- the job ---


def test_a_job_is_private_and_leaves_nothing(tmp_path):
    job = make_job(tmp_path)
    assert stat.S_IMODE(job.directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(job.key_file.stat().st_mode) == 0o600
    assert read_key(job.key_file) == job.key and len(job.key) == 32
    assert len(job.job_id) == 16 and int(job.job_id, 16) >= 0
    assert job.key.hex() not in repr(job) and repr(job.key) not in repr(job)
    with StoreServer(job.directory, job.key, job.job_id):
        pass
    assert os.listdir(job.directory) == ["job.key"]
    job.remove()
    job.remove()
    assert os.listdir(tmp_path) == []


def test_a_missing_or_broken_key_file_says_so(tmp_path):
    with pytest.raises(StoreError, match=r"job\.key"):
        read_key(tmp_path / "job.key")
    (tmp_path / "short").write_bytes(b"x" * 31)
    with pytest.raises(StoreError, match="32 bytes"):
        read_key(tmp_path / "short")


# --- values ---


def test_values_go_both_ways(server, client):
    server.set("func", b"\x00code")
    a, b = client(0), client(1)
    assert b.get("func", 1) == b"\x00code"
    a.set("result/0", b"zero")
    a.set("result/0", b"")
    b.set("result/1", b"one")
    b.set("fault/1", b"{}")
    assert server.items("result/") == {"result/0": b"", "result/1": b"one"}
    assert server.get("fault/1") == b"{}" and server.get("fault/0") is None
    assert server.pop("fault/1") == b"{}" and server.items("fault/") == {}


@pytest.mark.parametrize("setter", ["server", "client"])
def test_get_waits_for_the_value(server, client, setter):
    reader = client(0)
    writer = server if setter == "server" else client(1)
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(reader.get, "late", 10)
        time.sleep(0.05)
        assert not got.done()
        writer.set("late", b"here")
        assert got.result(timeout=5) == b"here"


def test_a_get_that_times_out_names_the_key_and_the_client_goes_on(client):
    reader = client()
    began = time.monotonic()
    with pytest.raises(StoreTimeout, match=r"0\.2 s.*'nothing'"):
        reader.get("nothing", 0.2)
    assert 0.15 < time.monotonic() - began < 2
    reader.set("something", b"1")
    assert reader.get("something", 1) == b"1"


def test_one_thread_that_waits_does_not_keep_another_from_reporting(server, client):
    shared = client()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(shared.get, "go", 10)
        time.sleep(0.05)
        shared.set("fault/0", b"lost")
        assert server.get("fault/0") == b"lost"
        server.set("go", b"1")
        assert waiting.result(5) == b"1"


def test_a_closed_client_ends_its_waits_and_refuses_calls(client):
    closing = client()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(closing.get, "never", 30)
        time.sleep(0.05)
        closing.close()
        with pytest.raises(StoreError):
            waiting.result(5)
    with pytest.raises(StoreError, match="closed"):
        closing.set("x", b"")


def test_a_value_of_600_mb_costs_its_size_and_disturbs_nobody(job):
    """In a process of its own: peak memory is its measure, and it is the server's alone."""
    size = 600 << 20
    reader_end, writer_end = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            server = StoreServer(job.directory, job.key, job.job_id)
            before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            server.start()
            os.write(writer_end, b"r")
            while server.get("done") is None:
                time.sleep(0.01)
            value = server.get("result/0")
            peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb
            good = value is not None and len(value) == size and value[-1:] == b"\x07"
            os.write(writer_end, struct.pack("!?q", good, peak_kb))
            server.close()
            code = 0
        finally:
            os._exit(code)
    os.close(writer_end)
    try:
        assert os.read(reader_end, 1) == b"r"
        large, small = (StoreClient(job.address, job.key, job.job_id, r) for r in (0, 1))
        payload = bytearray(size)
        payload[-1] = 7
        slowest = 0.0
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(large.set, "result/0", payload)
            calls = 0
            while not sending.done():
                began = time.monotonic()
                small.set("beat", b"x")
                slowest = max(slowest, time.monotonic() - began)
                calls += 1
            sending.result()
        assert calls > 20 and slowest < 0.5
        small.set("done", b"")
        good, peak_kb = struct.unpack("!?q", os.read(reader_end, 9))
        assert good
        assert peak_kb < size * 1.3 / 1024
        large.close()
        small.close()
    finally:
        os.close(reader_end)
        assert os.waitpid(child, 0)[1] == 0


# --- rounds ---


def test_a_round_gives_everyone_all_payloads_and_a_growing_generation(client):
    members = [client(r) for r in range(4)]
    for generation in (1, 2, 3):
        results = threads_of(
            lambda r, g=generation: members[r].rendezvous("init", 4, b"%d.%d" % (g, r), 10),
            [(r,) for r in range(4)],
        )
        assert results == [(generation, [b"%d.%d" % (generation, r) for r in range(4)])] * 4
    assert client(0).rendezvous("other", 1, b"", 1) == (1, [b""])


def test_two_names_run_at_once(client):
    a, b = client(0), client(1)
    results = threads_of(
        lambda who, name, payload: who.rendezvous(name, 2, payload, 10),
        [(a, "x", b"ax"), (b, "y", b"by"), (b, "x", b"bx"), (a, "y", b"ay")],
    )
    assert [payloads for _, payloads in results] == [
        [b"ax", b"bx"], [b"ay", b"by"], [b"ax", b"bx"], [b"ay", b"by"]
    ]  # fmt: skip


def test_a_timeout_names_the_missing_and_frees_the_place(client):
    with pytest.raises(StoreTimeout, match=r"ranks 0, 2 of 3 did not join 'init'"):
        client(1).rendezvous("init", 3, b"", 0.2)
    members = [client(r) for r in range(3)]
    results = threads_of(
        lambda r: members[r].rendezvous("init", 3, b"%d" % r, 10), [(r,) for r in range(3)]
    )
    assert results == [(1, [b"0", b"1", b"2"])] * 3


def test_who_gave_up_first_is_not_said_never_to_have_come(client):
    first, second = client(0), client(2)
    with ThreadPoolExecutor(2) as pool:
        last = pool.submit(second.rendezvous, "init", 3, b"", 2.0)
        with pytest.raises(StoreTimeout):
            first.rendezvous("init", 3, b"", 0.5)
        with pytest.raises(StoreTimeout, match=r"rank 1 of 3 did not join 'init' \(rank 0 joined"):
            last.result(10)


def test_a_rank_that_joins_again_replaces_its_first_entry(client):
    first, second, other = client(0), client(0), client(1)
    with ThreadPoolExecutor(2) as pool:
        old = pool.submit(first.rendezvous, "init", 2, b"old", 10)
        time.sleep(0.05)
        new = pool.submit(second.rendezvous, "init", 2, b"new", 10)
        with pytest.raises(StoreError, match="again"):
            old.result(5)
        assert other.rendezvous("init", 2, b"one", 10) == (1, [b"new", b"one"])
        assert new.result(5)[0] == 1


def test_a_rank_whose_connection_dies_is_taken_out_of_the_round(client):
    dying = client(0)
    with ThreadPoolExecutor(1) as pool:
        gone = pool.submit(dying.rendezvous, "init", 2, b"", 10)
        time.sleep(0.05)
        dying.close()
        with pytest.raises(StoreError):
            gone.result(5)
    with pytest.raises(StoreTimeout, match=r"rank 0 of 2 did not join"):
        client(1).rendezvous("init", 2, b"", 0.2)


@pytest.mark.parametrize("joined", [False, True])
def test_a_rank_that_has_ended_fails_its_rounds_at_once(server, client, joined):
    early, late, ending = client(0), client(1), client(2)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(early.rendezvous, "init", 3, b"", 20)]
        if joined:
            waiting.append(pool.submit(ending.rendezvous, "init", 3, b"", 20))
        time.sleep(0.05)
        server.end(2, "SIGKILL")
        server.end(2, "exit code 0")
        ending.close()
        for result in waiting[1:]:
            with pytest.raises(StoreError):
                result.result(5)
        text = r"rank 2 has ended \(SIGKILL\), so 'init' can't be completed"
        with pytest.raises(RankEnded, match=text) as caught:
            waiting[0].result(5)
        assert caught.value.rank == 2
    began = time.monotonic()
    with pytest.raises(RankEnded, match=text):
        late.rendezvous("init", 3, b"", 20)
    assert time.monotonic() - began < 5
    assert client(0).rendezvous("smaller", 1, b"x", 5) == (1, [b"x"])


def test_disagreement_about_the_size_is_an_error_of_the_one_who_came_last(client):
    a, b = client(0), client(1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(a.rendezvous, "init", 2, b"a", 10)
        time.sleep(0.05)
        with pytest.raises(StoreError, match="one of 3"):
            b.rendezvous("init", 3, b"b", 10)
        with pytest.raises(StoreError, match="rank 7"):
            client(7).rendezvous("init", 2, b"b", 10)
        assert b.rendezvous("init", 2, b"b", 10) == waiting.result(5)


def test_64_ranks_meet(client):
    members = [client(r) for r in range(64)]
    results = threads_of(
        lambda r: members[r].rendezvous("init", 64, b"%d" % r, 20), [(r,) for r in range(64)]
    )
    assert results == [(1, [b"%d" % r for r in range(64)])] * 64


# --- strangers ---


def stranger(server) -> socket.socket:
    sock = sockets.connect(Path(server.address.removeprefix("unix:")), time.monotonic() + 5)
    sock.settimeout(10)
    return sock


def closed_by_the_other_end(sock) -> bool:
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


HOSTILE = {
    "http put": b"PUT /runfunc/func HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc",
    "http get": b"GET / HTTP/1.1\r\n\r\n",
    "random": bytes(range(255, 0, -1)) * 4,
    "pickle": pickle.dumps({"an": "object"}),
    "2 GB length": struct.pack("!I", 2**31 - 1) + b"x" * 200,
    "2 GB value": struct.pack("!BBHIQQ", 1, 1, 0, 0, 0, 2**31) + b"k" + b"v" * 100,
    "wrong proof": b"HVDproof" + bytes(4 + 32 + 32),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_bytes_are_refused_and_members_undisturbed(server, client, data):
    member = client()
    with stranger(server) as sock:
        sock.sendall(data)
        assert closed_by_the_other_end(sock)
    member.set("still", b"fine")
    assert server.items("") == {"still": b"fine"}


def test_a_recorded_handshake_cannot_be_replayed(job, server):
    """A tap between a member and the store records all the member says; then it says it again."""
    tap_path = job.directory / "tap.sock"
    recorded = bytearray()
    with sockets.listen(tap_path, 1) as tap:
        tap.setblocking(True)

        def relay():
            inner, _ = tap.accept()
            with inner, stranger(server) as outer:
                for source, sink, count in [(outer, inner, 40), (inner, outer, 76),
                                            (outer, inner, 32), (inner, outer, 29)]:  # fmt: skip
                    data = proof.receive_exactly(source, count, time.monotonic() + 5)
                    sink.sendall(data)
                    if source is inner:
                        recorded.extend(data)
                inner.sendall(outer.recv(1 << 10))

        thread = threading.Thread(target=relay)
        thread.start()
        victim = StoreClient(f"unix:{tap_path}", job.key, job.job_id, 0)
        victim.set("x", b"1234")
        thread.join()
        victim.close()
    assert server.pop("x") == b"1234"
    with stranger(server) as sock:
        sock.sendall(recorded)
        assert closed_by_the_other_end(sock)
    assert server.get("x") is None


def test_members_of_another_job_are_refused(job, server):
    for key, job_id in [(bytes(32), job.job_id), (job.key, "0" * 16)]:
        with pytest.raises(StoreError, match="refused this process"):
            StoreClient(server.address, key, job_id, 0)


def test_a_slow_loris_is_cut_off_while_members_work(server, client):
    with stranger(server) as sock:
        sock.recv(1 << 10)
        began = time.monotonic()
        sock.sendall(b"H")
        member = client()
        slowest = 0.0
        sock.setblocking(False)
        while time.monotonic() - began < 6:
            called = time.monotonic()
            member.set("beat", b"")
            slowest = max(slowest, time.monotonic() - called)
            try:
                if sock.recv(1) == b"":
                    break
            except BlockingIOError:
                time.sleep(0.02)
        assert proof.HANDSHAKE_S - 0.5 < time.monotonic() - began < proof.HANDSHAKE_S + 1
        assert slowest < 0.5


def test_300_half_open_connections_keep_no_member_out(server, client):
    with ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(stranger(server))
        began = time.monotonic()
        client().set("x", b"")
        assert time.monotonic() - began < 2.5
        assert open_descriptors() < 300 + 128 + 60


def test_many_refusals_are_one_line_and_no_descriptor(server, client, caplog):
    client().set("warm", b"")
    before = open_descriptors()
    with caplog.at_level(logging.WARNING, logger="horovod"):
        for _ in range(50):
            with stranger(server) as sock:
                sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
                assert closed_by_the_other_end(sock)
    assert len([r for r in caplog.records if "refused" in r.getMessage()]) == 1
    assert open_descriptors() <= before


def test_a_member_that_breaks_the_schema_is_dropped(job, server, client):
    sock = stranger(server)
    with sock:
        bound = proof.context("store", job.job_id)
        proof.prove(sock, job.key, bound, 0, time.monotonic() + 3)
        sock.settimeout(5)
        sock.sendall(b"\xff" * 24)
        assert closed_by_the_other_end(sock)
    client().set("x", b"1")
    assert server.get("x") == b"1"


# --- what it costs, where it lies ---


def test_the_server_sleeps_when_nothing_happens(server, client):
    client().set("x", b"")

    def switches(thread_id: int) -> int:
        text = Path(f"/proc/self/task/{thread_id}/status").read_text()
        return sum(int(line.split()[1]) for line in text.splitlines() if "ctxt_switches" in line)

    (thread,) = [t for t in threading.enumerate() if t.name == "horovod-store"]
    assert thread.daemon
    time.sleep(0.1)
    before = switches(thread.native_id)
    time.sleep(0.5)
    assert switches(thread.native_id) - before <= 1


def test_a_path_longer_than_a_socket_address_works(tmp_path):
    deep = tmp_path / ("d" * 90) / ("e" * 90)
    deep.mkdir(parents=True)
    job = make_job(deep)
    with StoreServer(job.directory, job.key, job.job_id) as server:
        client = StoreClient(server.address, job.key, job.job_id, 0)
        client.set("x", b"1")
        assert server.get("x") == b"1"
        client.close()
    job.remove()


def test_start_and_close_leave_no_descriptor_and_no_thread(job):
    def cycle():
        with StoreServer(job.directory, job.key, job.job_id) as server:
            client = StoreClient(server.address, job.key, job.job_id, 0)
            client.set("x", b"")
            client.close()

    cycle()
    before = open_descriptors(), threading.active_count()
    for _ in range(20):
        cycle()
    assert (open_descriptors(), threading.active_count()) == before


def test_clients_of_a_store_that_ends_are_told(job):
    server = StoreServer(job.directory, job.key, job.job_id)
    server.start()
    client = StoreClient(server.address, job.key, job.job_id, 5)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.get, "never", 30)
        time.sleep(0.05)
        server.close()
        server.close()
        with pytest.raises(StoreError, match="launcher"):
            waiting.result(5)
    with pytest.raises(StoreError, match="rank 5 cannot reach"):
        client.set("x", b"")
    client.close()


def test_an_address_of_another_kind_is_refused(job):
    with pytest.raises(StoreError, match="unix:/path"):
        StoreClient("tcp://1.2.3.4:5", job.key, job.job_id, 0)


def test_a_store_that_stopped_answering_costs_a_reporter_its_timeout_only(job):
    """A frozen launcher: its socket is there and accepts, nothing ever comes back."""
    with sockets.listen(job.directory / "store.sock", 8) as frozen:
        frozen.setblocking(True)

        def prove_then_freeze():
            sock, _ = frozen.accept()
            acceptor = proof.Acceptor(job.key, proof.context("store", job.job_id))
            sock.sendall(acceptor.greeting)
            sock.sendall(acceptor.feed(sock.recv(acceptor.need)))
            return sock

        with ThreadPoolExecutor(1) as pool:
            accepted = pool.submit(prove_then_freeze)
            client = StoreClient(job.address, job.key, job.job_id, 0)
            began = time.monotonic()
            with pytest.raises(StoreError, match="timed out"):
                client.set("fault/0", b"", 0.3)
            with pytest.raises(StoreError, match="cannot reach"):
                client.set("fault/0", b"", 0.3)
            assert time.monotonic() - began < 2
            accepted.result().close()
        client.close()
