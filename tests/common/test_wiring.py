"""Wiring: who is connected to whom over what, who is kept out, and what a failure leaves behind."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import itertools
import json
import mmap
import os
import resource
import select
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from horovod.common import config, proof, sockets, wiring
from horovod.common.exceptions import HorovodInternalError, PeerLostError, ResourceError
from horovod.common.store import StoreClient, StoreServer, make_job

SEGMENT_BYTES = 1 << 16
PLAN = {"fusion_threshold_bytes": 12345}


@pytest.fixture
def connect_all(job, server, settings):
    """Connects ``size`` ranks as threads; gives each rank's wires, or the error it raised."""
    made = []

    def run(size, ranks=None, **changes):
        def one(rank):
            mine = settings(rank, size, **changes)
            client = StoreClient(job.address, job.key, job.job_id, rank)
            try:
                wires = wiring.connect(mine, {**PLAN, "of": rank}, SEGMENT_BYTES, client)
                made.append(wires)
                return wires
            except HorovodInternalError as error:
                return error
            finally:
                client.close()

        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(one, range(size) if ranks is None else ranks))

    yield run
    for wires in made:
        wires.close()


def descriptors() -> dict[int, str]:
    result = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            result[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the descriptor that listed the directory
            continue
    return result


@pytest.fixture
def kinds(server):
    """The kinds of all open descriptors, once the store has dropped the clients that have left.

    Its thread closes their sockets in its own time, so an expected list is waited for.
    """

    def look(expected: list[str] | None = None) -> list[str]:
        deadline = time.monotonic() + 5
        while True:
            found = sorted(target.split(":")[0] for target in descriptors().values())
            settled = not server._connections and expected in (None, found)
            if settled or time.monotonic() >= deadline:
                return found
            time.sleep(0.005)

    return look


def lists(wires):
    return [wires.segments, wires.doorbells, wires.sockets, wires.pidfds]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_pair_shares_memory_doorbells_and_a_socket(connect_all, size):
    everyone = connect_all(size)
    for rank, wires in enumerate(everyone):
        assert [len(column) for column in lists(wires)] == [size] * 4
        assert wires.sockets[rank] == -1 and wires.pidfds[rank] == -1
        with mmap.mmap(wires.segments[rank], SEGMENT_BYTES) as own:
            own[:8] = b"rank%04d" % rank
    for rank, wires in enumerate(everyone):
        for peer in range(size):
            with mmap.mmap(wires.segments[peer], SEGMENT_BYTES, prot=mmap.PROT_READ) as theirs:
                assert theirs[:8] == b"rank%04d" % peer
            if peer != rank:
                os.eventfd_write(wires.doorbells[peer], 1)
                os.write(wires.sockets[peer], b"%02d>%02d" % (rank, peer))
    for rank, wires in enumerate(everyone):
        if size > 1:
            assert os.eventfd_read(wires.doorbells[rank]) == size - 1
        for peer in set(range(size)) - {rank}:
            assert os.read(wires.sockets[peer], 100) == b"%02d>%02d" % (peer, rank)


def test_all_have_the_plan_of_rank_0_one_generation_and_the_same_names(connect_all):
    for generation in (1, 2):
        everyone = connect_all(3)
        assert [w.plan for w in everyone] == [{**PLAN, "of": 0}] * 3
        assert [w.generation for w in everyone] == [generation] * 3
        assert [w.names for w in everyone] == [[f"here pid {os.getpid()}"] * 3] * 3
        assert [w.hosts for w in everyone] == [[0, 0, 0]] * 3


def test_hosts_follow_the_host_names_in_order_of_appearance(job, server, settings):
    def one(rank):
        client = StoreClient(job.address, job.key, job.job_id, rank)
        wires = wiring.connect(
            settings(rank, 4, hostname="abab"[rank]), PLAN, SEGMENT_BYTES, client
        )
        wires.close()
        client.close()
        return wires.hosts

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(one, range(4))) == [[0, 1, 0, 1]] * 4


def test_segments_are_sealed_and_allocated_and_nothing_is_inherited(connect_all):
    for wires in connect_all(2):
        for segment in wires.segments:
            with pytest.raises(PermissionError):
                os.ftruncate(segment, 0)
            with pytest.raises(PermissionError):
                os.ftruncate(segment, 2 * SEGMENT_BYTES)
            assert os.fstat(segment).st_blocks * 512 >= SEGMENT_BYTES
        for descriptor in itertools.chain(*lists(wires)):
            if descriptor >= 0:
                assert fcntl.fcntl(descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC


def test_closing_gives_every_descriptor_back_and_no_file_remains(job, connect_all, kinds):
    for wires in connect_all(3):
        wires.close()
    before = kinds()
    for wires in connect_all(3):
        wires.close()
        wires.close()
    assert kinds(before) == before
    assert sorted(os.listdir(job.directory)) == ["job.key", "store.sock"]


def test_24_ranks_are_a_full_mesh(connect_all):
    everyone = connect_all(24, start_timeout_s=30.0)
    for rank, wires in enumerate(everyone):
        assert [s >= 0 for s in wires.sockets] == [peer != rank for peer in range(24)]


SCRIPT = """
import dataclasses, mmap, os, sys
from horovod.common import config, wiring
from horovod.common.store import StoreClient, read_key
s = config.from_environ()
client = StoreClient(s.store, read_key(s.job_key_file), s.job_id, s.rank)
w = wiring.connect(s, {}, 4096, client)
mmap.mmap(w.segments[s.rank], 4096)[0] = s.rank + 1
for peer in range(s.size):
    if peer != s.rank:
        os.write(w.sockets[peer], b"x")
for peer in range(s.size):
    if peer != s.rank:
        os.set_blocking(w.sockets[peer], True)
        assert os.read(w.sockets[peer], 1) == b"x"
        assert mmap.mmap(w.segments[peer], 4096)[0] == peer + 1
        assert w.pidfds[peer] >= 0
print(w.names)
"""


def test_real_processes_meet(job, server):
    def start(rank):
        placement = {"HOROVOD_RANK": str(rank), "HOROVOD_SIZE": "3", "HOROVOD_HOSTNAME": "h"}
        job_variables = {
            "HOROVOD_STORE": job.address,
            "HOROVOD_JOB_KEY_FILE": str(job.key_file),
            "HOROVOD_JOB_ID": job.job_id,
        }
        return subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, **placement, **job_variables},
            stdout=subprocess.PIPE,
            text=True,
        )

    workers = [start(rank) for rank in range(3)]
    outputs = [worker.communicate(timeout=30)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0, 0]
    assert outputs == [f"{[f'h pid {worker.pid}' for worker in workers]}\n"] * 3


def test_the_socket_ends_when_a_peer_closes(connect_all):
    first, second = connect_all(2)
    second.close()
    assert select.select([first.sockets[1]], [], [], 5)[0]
    assert os.read(first.sockets[1], 1) == b""


# --- who does not come, who is not let in ---


def test_the_missing_are_named(connect_all):
    (error,) = connect_all(4, ranks=[2], start_timeout_s=0.3)
    assert type(error) is HorovodInternalError
    assert "ranks 0, 1, 3 of 4 did not join" in str(error)
    assert "HOROVOD_START_TIMEOUT" in str(error)


def card(**changes):
    fields = {"version": wiring.VERSION, "host": "h", "pid": 1, "door": "d.sock", "plan": PLAN}
    fields.update(memory_bytes=SEGMENT_BYTES, process_sets="[]")
    return json.dumps({**fields, **changes}).encode()


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (b"\x80\x04", "no card"),
        (b"[" * 9000, "no card"),
        (b"x" * 20000, "20000 bytes"),
        (b"[]", "version None"),
        (card(version=99), "version 99"),
        (card(host=5), "without host"),
        (card(pid=True), "without host"),
        (card(memory_bytes=0), "without memory_bytes"),
        (card(plan=[1]), "without a plan"),
        (card(plan={"a": "b"}), "without a plan"),
        (card(door="../x"), "outside"),
    ],
)
def test_a_rank_of_another_version_is_named(job, server, settings, payload, words):
    odd = StoreClient(job.address, job.key, job.job_id, 1)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(odd.rendezvous, "init", 2, payload, 10)
        client = StoreClient(job.address, job.key, job.job_id, 0)
        with pytest.raises(HorovodInternalError, match=f"rank 1 sent .*{words}") as raised:
            wiring.connect(settings(0, 2), PLAN, SEGMENT_BYTES, client)
    assert raised.value.rank == 1
    odd.close()
    client.close()


class FakeRank:
    """Rank 1 of 2 up to the meeting; what it does at rank 0's door is the test's business."""

    def __init__(self, job):
        self._job = job
        self._client = StoreClient(job.address, job.key, job.job_id, 1)

    def knock(self) -> socket.socket:
        generation, cards = self._client.rendezvous("init", 2, card(pid=os.getpid()), 10)
        self.bound = proof.context("engine", self._job.job_id, generation, 0)
        self.door = self._job.directory / json.loads(cards[0])["door"]
        self._client.close()
        return self.connect()

    def connect(self):
        sock = sockets.connect(self.door, time.monotonic() + 5)
        sock.settimeout(10)
        return sock

    def prove(self, sock, member=1):
        proof.prove(sock, self._job.key, self.bound, member, time.monotonic() + 3)


@pytest.fixture
def against_fake(job, server, settings):
    """Runs rank 0 of 2 against what ``play(fake, sock)`` does; returns rank 0's wires or error."""

    def run(play, **changes):
        fake = FakeRank(job)
        client = StoreClient(job.address, job.key, job.job_id, 0)

        def rank_0():
            try:
                return wiring.connect(settings(0, 2, **changes), PLAN, SEGMENT_BYTES, client)
            except HorovodInternalError as error:
                return error

        with ThreadPoolExecutor(1) as pool:
            result = pool.submit(rank_0)
            with fake.knock() as sock:
                kept = play(fake, sock)
                outcome = result.result(30)
            del kept
        client.close()
        return outcome

    return run


def gift(size_bytes=SEGMENT_BYTES):
    return wiring._GIFT.pack(wiring._GIFT_MAGIC, size_bytes)


def test_strangers_at_the_door_disturb_nobody(job, against_fake, caplog):
    def play(fake, sock):
        crowd = [fake.connect() for _ in range(3)]
        crowd[0].sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        crowd[1].sendall(b"HVDproof" + bytes(68))
        crowd[2].close()
        crowd += [fake.connect() for _ in range(100)]
        for member in (0, 7, -1):  # members of the job, but no rank that is waited for
            odd = fake.connect()
            fake_bound = fake.bound
            try:
                proof.prove(odd, job.key, fake_bound, member, time.monotonic() + 3)
                assert odd.recv(1) == b""
            except proof.ProofError:
                pass
            odd.close()
        sock.close()
        with fake.connect() as good:
            fake.prove(good)
            segment, bell = wiring._make_segment(SEGMENT_BYTES), os.eventfd(0)
            sockets.send_descriptors(good, gift(), [segment, bell])
            data, got = sockets.receive_descriptors(good, 16, 2)
            for descriptor in [segment, bell, *got]:
                os.close(descriptor)
            assert data == gift()
        return crowd

    wires = against_fake(play)
    assert isinstance(wires, wiring.Wires)
    wires.close()
    refusals = [r for r in caplog.records if "the door of rank 0 refused" in r.getMessage()]
    assert len(refusals) == 1, refusals


def unsealed():
    descriptor = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.posix_fallocate(descriptor, 0, SEGMENT_BYTES)
    return descriptor


def sparse():
    descriptor = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, SEGMENT_BYTES)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, wiring._SEALS)
    return descriptor


def on_disk():
    descriptor = os.open("/tmp", os.O_TMPFILE | os.O_RDWR)
    os.posix_fallocate(descriptor, 0, SEGMENT_BYTES)
    return descriptor


@pytest.mark.parametrize(
    ("segment", "bell", "words"),
    [
        (unsealed, lambda: os.eventfd(0), "not sealed"),
        (sparse, lambda: os.eventfd(0), "not allocated"),
        (on_disk, lambda: os.eventfd(0), "not sealed"),
        (lambda: wiring._make_segment(4096), lambda: os.eventfd(0), "4096 bytes"),
        (lambda: os.eventfd(0), lambda: os.eventfd(0), "0 bytes"),
        (
            lambda: wiring._make_segment(SEGMENT_BYTES),
            lambda: os.memfd_create("x"),
            "no eventfd",
        ),
    ],
)
def test_unsafe_memory_never_reaches_the_engine(against_fake, kinds, segment, bell, words):
    before = kinds()

    def play(fake, sock):
        fake.prove(sock)
        pair = [segment(), bell()]
        sockets.send_descriptors(sock, gift(), pair)
        for descriptor in pair:
            os.close(descriptor)

    error = against_fake(play)
    assert isinstance(error, HorovodInternalError)
    assert error.rank == 1
    assert "rank 1 handed over" in str(error) and words in str(error)
    assert kinds(before) == before


@pytest.mark.parametrize("data", [b"", b"short", b"x" * 16])
def test_a_peer_that_gives_nothing_is_named(against_fake, data):
    def play(fake, sock):
        fake.prove(sock)
        if data:
            sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)

    error = against_fake(play)
    assert isinstance(error, HorovodInternalError) and error.rank == 1
    assert ("handed over no shared memory" if data else "rank 1 (h pid") in str(error)


def test_a_peer_that_joined_and_fell_silent_is_named_in_time(against_fake, monkeypatch):
    monkeypatch.setattr(wiring, "_LINKS_S", 0.3)
    began = time.monotonic()
    error = against_fake(lambda fake, sock: fake.prove(sock), start_timeout_s=0.5)
    assert isinstance(error, PeerLostError) and error.rank == 1
    assert "rank 1 (h pid" in str(error) and "did not connect" in str(error)
    assert time.monotonic() - began < 3


# --- the machine refuses ---


class FailsAt:
    """A function that works but for one call, counted over all ranks, which raises ``code``."""

    def __init__(self, function, call, code):
        self._function = function
        self.left = call
        self._code = code

    def __call__(self, *arguments, **named):
        self.left -= 1
        if self.left == 0:
            raise OSError(self._code, os.strerror(self._code))
        return self._function(*arguments, **named)


STAGES = [
    (sockets, "listen", 1),
    (sockets, "listen", 3),
    (os, "memfd_create", 1),
    (os, "memfd_create", 3),
    (os, "posix_fallocate", 2),
    (fcntl, "fcntl", 1),
    (os, "eventfd", 2),
    (sockets, "connect", 1),
    (sockets, "connect", 3),
    (wiring.selectors, "DefaultSelector", 2),
    (sockets, "send_descriptors", 1),
    (sockets, "send_descriptors", 5),
    (sockets, "receive_descriptors", 2),
    (sockets, "receive_descriptors", 6),
    (os, "pidfd_open", 1),
    (os, "pidfd_open", 6),
]


@pytest.mark.parametrize(("module", "name", "call"), STAGES, ids=[f"{n}-{c}" for _, n, c in STAGES])
@pytest.mark.parametrize("code", [errno.EMFILE, errno.EACCES])
def test_a_failure_at_any_stage_is_typed_and_leaves_nothing(
    job, connect_all, kinds, monkeypatch, module, name, call, code
):
    for wires in connect_all(3):
        wires.close()
    before = kinds()
    monkeypatch.setattr(wiring, "_LINKS_S", 0.5)
    # connect() of this module is also the store client's, which is made before and outside.
    function = FailsAt(getattr(module, name), call if name != "connect" else call + 3, code)
    monkeypatch.setattr(module, name, function)
    # Who has no door never joins, and the others can only wait; else they hear of it.
    outcomes = connect_all(3, start_timeout_s=1.0 if name == "listen" else 5.0)
    monkeypatch.undo()
    assert function.left <= 0, "the stage was never reached"
    errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    if (name, code) == ("pidfd_open", errno.EACCES):
        assert errors == []  # a rank does without
    else:
        assert errors
    if code == errno.EMFILE:
        assert any(isinstance(error, ResourceError) for error in errors)
        blamed = {error.rank for error in errors if isinstance(error, ResourceError)}
        assert len(blamed) == 1
        assert "ulimit -n" in next(str(e) for e in errors if isinstance(e, ResourceError))
    for outcome in outcomes:
        if isinstance(outcome, wiring.Wires):
            outcome.close()
    assert kinds(before) == before
    assert sorted(os.listdir(job.directory)) == ["job.key", "store.sock"]


def test_the_others_are_told_why_a_rank_gave_up(connect_all, monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", FailsAt(os.posix_fallocate, 1, errno.ENOMEM))
    began = time.monotonic()
    outcomes = connect_all(3)
    assert time.monotonic() - began < 3
    (guilty,) = [rank for rank, e in enumerate(outcomes) if isinstance(e, ResourceError)]
    assert "shared memory: Cannot allocate memory" in str(outcomes[guilty])
    told = [e for e in outcomes if isinstance(e, PeerLostError)]
    assert len(told) == 2
    for error in told:
        assert error.rank == guilty
        assert f"rank {guilty} (here pid" in str(error) and "Cannot allocate" in str(error)


def test_no_descriptor_left_is_a_typed_error_that_says_so(job, server, settings):
    """With a real limit, in a process of its own, at every limit that lets it get started."""
    script = """
import os, resource, sys
from horovod.common import config, wiring
from horovod.common.exceptions import HorovodInternalError, ResourceError
from horovod.common.store import StoreClient, read_key
s = config.from_environ()
key = read_key(s.job_key_file)
import json, selectors, socket
client = StoreClient(s.store, key, s.job_id, 0)
used = len(os.listdir("/proc/self/fd"))
seen = set()
for room in range(12):
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + room, hard))
    try:
        wiring.connect(s, {}, 4096, client).close()
        seen.add("good")
    except ResourceError as error:
        assert "ulimit -n" in str(error), error
        seen.add("refused")
    assert len(os.listdir("/proc/self/fd")) == used
print(sorted(seen))
"""
    variables = {
        "HOROVOD_RANK": "0",
        "HOROVOD_SIZE": "1",
        "HOROVOD_STORE": job.address,
        "HOROVOD_JOB_KEY_FILE": str(job.key_file),
        "HOROVOD_JOB_ID": job.job_id,
    }
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.stdout == "['good', 'refused']\n", done.stderr


def test_memory_beyond_the_file_size_limit_is_a_typed_error(connect_all):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SEGMENT_BYTES // 2, hard))
    try:
        (error,) = connect_all(1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert isinstance(error, ResourceError) and f"{SEGMENT_BYTES} bytes" in str(error)


def test_a_world_of_one_has_no_wires(settings):
    wires = wiring.world_of_one(settings(0, 1), PLAN)
    assert lists(wires) == [[-1]] * 4
    assert (wires.hosts, wires.generation, wires.plan) == ([0], 0, PLAN)
    wires.close()


def test_a_job_directory_deeper_than_a_socket_address_works(tmp_path):
    deep = tmp_path / ("d" * 90) / ("e" * 90)
    deep.mkdir(parents=True)
    job = make_job(deep)
    with StoreServer(job.directory, job.key, job.job_id):

        def one(rank):
            settings = dataclasses.replace(config.from_environ({}), rank=rank, size=2)
            client = StoreClient(job.address, job.key, job.job_id, rank)
            wires = wiring.connect(settings, PLAN, SEGMENT_BYTES, client)
            client.close()
            wires.close()
            return wires.generation

        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(one, range(2))) == [1, 1]
    assert os.listdir(job.directory) == ["job.key"]
    job.remove()
