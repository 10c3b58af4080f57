"""How processes end: what peers and launcher are told, forks, and that no exit takes long."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest

from horovod.common import basics

LOSE = """
basics.init()
me = basics.rank()
try:
    barrier()  # the death may come before it is over everywhere
    if me == 1:
        {end}
    while True:
        allreduce(1.0)
except HorovodInternalError as error:
    began = time.monotonic()
    print(type(error).__name__, error.rank, error)
    try:
        allreduce(1.0, "again")
        raise SystemExit("no error")
    except HorovodInternalError as error:
        assert error.rank == 1, error
"""


def faults(ranks) -> dict[int, dict]:
    found = ranks.server.items("fault/")
    return {int(key.removeprefix("fault/")): json.loads(value) for key, value in found.items()}


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        ('raise KeyError("x")', 1, "rank 1 exited: KeyError: 'x'"),
        ("sys.exit(3)", 3, "rank 1"),
        ("os._exit(4)", 4, "rank 1"),
        ("os._exit(0)", 0, "rank 1"),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9, "rank 1"),
        ("basics.shutdown(); time.sleep(1); sys.exit(0)", 0, "rank 1"),
    ],
)
def test_the_others_raise_at_once_and_name_the_rank_and_the_cause(ranks, end, code, words):
    ranks.start(LOSE.format(end=end), 3)
    began = time.monotonic()
    for rank in (0, 2):
        ranks.processes[rank].wait(10)
    assert time.monotonic() - began < 5
    ended = ranks.end()
    assert [e.code for e in ended] == [0, code, 0], [e.stderr for e in ended]
    for rank in (0, 2):
        assert ended[rank].stdout.split()[1] == "1" and words in ended[rank].stdout, ended[rank]


def test_an_uncaught_exception_is_reported_once_with_its_last_line(ranks):
    before = time.monotonic()
    ranks.start(LOSE.format(end='raise KeyError("x")'), 3)
    ended = ranks.end()
    assert "Traceback" in ended[1].stderr and ended[1].stderr.endswith("KeyError: 'x'\n")
    reports = faults(ranks)
    assert reports[1]["exception"] == "KeyError: 'x'" and reports[1]["lost"] is None
    assert before < reports[1]["time"] < time.monotonic()
    for rank in (0, 2):
        assert reports[rank]["lost"] == 1 and "KeyError" in reports[rank]["text"]
        assert reports[rank]["exception"] is None


def test_who_fails_because_of_another_says_so_even_with_an_exception_of_its_own(ranks):
    ranks.start(
        """
basics.init()
barrier()
if basics.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    while True:
        allreduce(1.0)
except HorovodInternalError:
    raise RuntimeError("training failed")
""",
        2,
    )
    ended = ranks.end()
    assert [e.code for e in ended] == [1, -9]
    assert faults(ranks).keys() == {0} and faults(ranks)[0]["lost"] == 1


def test_the_users_own_hook_still_runs_also_if_it_was_set_later(ranks):
    script = """
def mine(kind, error, trace):
    print("mine:", error)
    sys.stdout.flush()
{first}
basics.init()
{then}
barrier()
raise ValueError("oops %d" % basics.rank())
"""
    for first, then in [("sys.excepthook = mine", ""), ("", "sys.excepthook = mine")]:
        ranks.start(script.format(first=first, then=then), 1)
        ended = ranks.end()[-1]
        assert (ended.code, ended.stdout) == (1, "mine: oops 0\n")
        assert ranks.server.pop("fault/0") is not None
        ranks.processes.clear()


def test_a_rank_that_ends_normally_disturbs_nobody_who_does_not_need_it(ranks):
    ended = ranks.run(
        """
basics.init()
assert allreduce(1.0) == 3.0
if basics.rank() != 0:
    sys.exit(0)
time.sleep(1)
assert basics.is_initialized() and basics.size() == 3
print("done")
""",
        3,
    )
    assert ended[0].stdout == "done\n" and all(e.stderr == "" for e in ended)
    assert faults(ranks) == {}


def test_rank_0_may_end_first_as_well(ranks):
    ranks.run(
        """
basics.init()
assert allreduce(1.0) == 2.0
if basics.rank() == 1:
    time.sleep(1)
""",
        2,
    )
    assert faults(ranks) == {}


@pytest.mark.parametrize(
    ("leaver", "script"),
    [
        (0, "submit()"),
        (1, "submit(); raise KeyError('x')"),
        (1, "submit(); threading.Thread(target=time.sleep, args=(1,)).start()"),
        (
            0,
            "submit(); threading.Thread(target=time.sleep, args=(1,)).start(); raise KeyError('x')",
        ),
        (1, "submit(); os._exit(1)"),
        (
            0,
            "handle = submit(); threading.Thread(target=wait, args=(handle,), daemon=True).start()",
        ),
        (
            1,
            "handle = submit(); threading.Thread(target=wait, args=(handle,), daemon=True).start()",
        ),
        (0, "submit(); os.kill(os.getpid(), signal.SIGINT); time.sleep(9)"),
        (1, "sys.exit(5)"),
    ],
)
def test_every_exit_takes_less_than_5_s(ranks, leaver, script):
    """One rank leaves with operations in flight that the other never joins."""
    ranks.start(
        """
import array
data = array.array("d", [0.0])
def submit():
    address = data.buffer_info()[0]
    views = [basics.View(address, address, 8, (1,))]
    return basics.engine().submit(
        0, "allreduce.never", 0, views, 1, 1.0, 1.0, -1, None, False, data)
def wait(handle):
    while not basics.engine().wait(handle, 0.1):
        pass
basics.init()
barrier()
if basics.rank() != int(os.environ["LEAVER"]):
    time.sleep(30)
print("ready", flush=True)
"""
        + script,
        2,
        LEAVER=str(leaver),
    )
    assert ranks.processes[leaver].stdout.readline() == "ready\n"
    began = time.monotonic()
    ranks.processes[leaver].wait(10)
    assert time.monotonic() - began < 5


FORK = """
import gc
basics.init()
assert allreduce(1.0) == 2.0
before = len(os.listdir("/proc/self/fd"))
child = os.fork()
if child == 0:
    code = 1
    try:
        assert len(os.listdir("/proc/self/fd")) < before
        kinds = [os.readlink("/proc/self/fd/" + fd) for fd in os.listdir("/proc/self/fd")
                 if os.path.exists("/proc/self/fd/" + fd)]
        assert not [k for k in kinds if "socket" in k or "eventfd" in k or "memfd" in k], kinds
        assert basics.is_initialized() and basics.rank() == int(os.environ["HOROVOD_RANK"])
        for call in (basics.engine, basics.init, lambda: allreduce(1.0),
                     lambda: process_sets.add_process_set([0])):
            try:
                call()
                raise SystemExit("no error")
            except ForkedError as error:
                assert "forked" in str(error)
        {in_child}
        code = 0
    finally:
        if code:
            os._exit(code)
    sys.exit(0)
{in_parent}
for k in range(100):
    assert allreduce(1.0) == 2.0
assert os.waitpid(child, 0)[1] == 0
for k in range(100):
    assert allreduce(1.0) == 2.0
barrier()
basics.shutdown()
basics.init()
assert allreduce(1.0) == 2.0
"""


@pytest.mark.parametrize(
    ("in_child", "in_parent"),
    [
        ("pass", "pass"),
        ("basics.shutdown(); gc.collect()", "pass"),
        ("basics.shutdown(); basics.shutdown(); assert not basics.is_initialized()", "pass"),
        ("time.sleep(0.5)", "time.sleep(0.1)"),
    ],
)
def test_a_forked_child_is_inert_and_its_exit_disturbs_nobody(ranks, in_child, in_parent):
    ranks.run(FORK.format(in_child=in_child, in_parent=in_parent), 2)
    assert faults(ranks) == {}


def test_a_forked_child_ends_without_a_word(ranks):
    (ended,) = ranks.run(FORK.format(in_child="pass", in_parent="pass").replace("2.0", "1.0"), 1)
    assert ended.stderr == ""


def test_a_childs_exception_is_not_reported_as_the_ranks(ranks):
    ranks.run(
        """
basics.init()
barrier()
child = os.fork()
if child == 0:
    raise KeyError("in the child")
os.waitpid(child, 0)
assert allreduce(1.0) == 2.0
""",
        2,
    )
    assert faults(ranks) == {}


def test_forks_while_other_threads_are_busy(ranks):
    """The lock of another thread, held at the moment of the fork, must not stop the child."""
    ranks.run(
        """
basics.init()
stop = False
def work():
    while True:
        allreduce(1.0, "w")
        if allreduce(float(stop), "s"):
            return
thread = threading.Thread(target=work)
thread.start()
children = []
for k in range(10):
    child = os.fork()
    if child == 0:
        try:
            basics.engine()
        except ForkedError:
            basics.shutdown()
            os._exit(0)
        os._exit(1)
    children.append(child)
for child in children:
    assert os.waitpid(child, 0)[1] == 0
stop = True
thread.join()
barrier()
""",
        2,
    )


def test_death_is_seen_although_a_forked_child_lives_on(ranks):
    ranks.start(
        """
basics.init()
barrier()
if basics.rank() == 1:
    child = os.fork()
    if child == 0:
        time.sleep(3)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)
try:
    while True:
        allreduce(1.0)
except PeerLostError as error:
    assert error.rank == 1
""",
        2,
    )
    began = time.monotonic()
    assert ranks.processes[0].wait(10) == 0
    assert time.monotonic() - began < 2.5
    ranks.kill()


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_multiprocessing_children_of_every_kind(ranks, tmp_path, method):
    path = tmp_path / "child.py"
    path.write_text("def child(queue):\n    import os\n    queue.put(os.getpid())\n")
    ranks.run(
        f"""
import multiprocessing
sys.path.insert(0, {str(tmp_path)!r})
from child import child
if __name__ == "__main__":
    basics.init()
    context = multiprocessing.get_context("{method}")
    queue = context.Queue()
    workers = [context.Process(target=child, args=(queue,)) for _ in range(2)]
    for worker in workers: worker.start()
    assert allreduce(1.0) == 2.0
    assert sorted(queue.get(timeout=20) for _ in workers) == sorted(w.pid for w in workers)
    for worker in workers: worker.join()
    assert allreduce(1.0) == 2.0
""",
        2,
    )


def test_a_child_that_is_forked_while_init_waits_is_inert(ranks):
    """Rank 1 comes late, so rank 0 is in init(), with a store connection and a door, for sure."""
    ranks.run(
        """
if os.environ["HOROVOD_RANK"] == "1":
    while not os.path.exists(os.environ["FLAG"]):
        time.sleep(0.01)
    basics.init()
else:
    thread = threading.Thread(target=basics.init)
    thread.start()
    def kinds():
        found = []
        for name in os.listdir("/proc/self/fd"):
            try:
                found.append(os.readlink("/proc/self/fd/" + name).split(":")[0])
            except FileNotFoundError:
                continue
        return found
    while kinds().count("socket") < 2:
        time.sleep(0.01)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            assert "socket" not in kinds() and "anon_inode" not in kinds(), kinds()
            for call in (basics.engine, basics.init):
                try:
                    call()
                    raise SystemExit("no error")
                except ForkedError:
                    pass
            basics.shutdown()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    open(os.environ["FLAG"], "w").close()
    thread.join()
assert allreduce(1.0) == 2.0
""",
        2,
        FLAG=str(ranks.job.directory / "flag"),
    )


def test_forks_amid_init_and_shutdown_leave_the_parent_a_working_engine(ranks):
    ranks.run(
        """
stop = False
def fork_on():
    while not stop:
        child = os.fork()
        if child == 0:
            basics.shutdown()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
thread = threading.Thread(target=fork_on)
thread.start()
for _ in range(5):
    basics.init()
    assert allreduce(1.0) == 2.0
    basics.shutdown()
stop = True
thread.join()
basics.init()
barrier()
""",
        2,
    )
    assert faults(ranks) == {}


@pytest.mark.parametrize("moment", ["before", "while"])
def test_only_a_loss_before_this_rank_leaves_is_reported(monkeypatch, moment):
    class Engine:
        failed = moment == "before"

        def take_messages(self):
            return []

        def failure(self):
            return (3, "lost rank 1", 1) if self.failed else None

        def shutdown(self, reason, timeout_s):
            self.failed = True
            world.pass_on()  # as the watcher does

    class Store:
        def __init__(self):
            self.told = []

        def set(self, key, value, timeout_s):
            self.told.append((key, json.loads(value)["lost"]))

        def close(self):
            pass

    store = Store()
    world = basics._World(SimpleNamespace(rank=0, size=2), Engine(), store, None)
    monkeypatch.setattr(basics._runtime, "world", world)
    monkeypatch.setattr(basics._runtime, "registrar", None)
    basics.shutdown()
    assert store.told == ([("fault/0", 1)] if moment == "before" else [])
