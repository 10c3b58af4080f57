"""init, shutdown and what they answer, in real processes with the launcher's environment."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from .ranks import PRELUDE

STARTERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


def alone(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a script as a process that no launcher started."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("HOROVOD_") and name not in STARTERS
    }
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + script],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=30,
    )


def good(ended: subprocess.CompletedProcess[str]) -> str:
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_before_init_everything_says_so():
    good(
        alone("""
assert basics.is_initialized() is False
basics.shutdown()
for name in ("rank size local_rank local_size cross_rank cross_size is_homogeneous "
             "mpi_threads_supported stop_timeline").split():
    try:
        getattr(basics, name)()
        raise SystemExit(name)
    except ValueError as error:
        assert "not initialized" in str(error)
try:
    basics.start_timeline("/tmp/x")
    raise SystemExit("start_timeline")
except ValueError as error:
    assert "not initialized" in str(error)
try:
    basics.engine()
    raise SystemExit("engine")
except HorovodInternalError as error:
    assert isinstance(error, ShutdownError) and "call init()" in str(error)
""")
    )


def test_what_is_built_needs_no_init():
    good(
        alone("""
assert basics.gloo_built() is True and basics.gloo_enabled() is True
assert basics.nccl_built() == 0 and basics.nccl_built() < 2700
for name in "mpi_built mpi_enabled ddl_built ccl_built cuda_built rocm_built".split():
    assert getattr(basics, name)() is False
""")
    )


def test_a_process_on_its_own_is_a_world_of_one():
    good(
        alone("""
basics.init()
basics.init(comm=[0])
basics.init(comm=[])
assert basics.is_initialized() is True
assert (basics.rank(), basics.size(), basics.local_rank(), basics.local_size()) == (0, 1, 0, 1)
assert (basics.cross_rank(), basics.cross_size(), basics.is_homogeneous()) == (0, 1, True)
assert basics.host_of(0) == "localhost" and basics.host_of(1) is None
assert allreduce(5.0) == 5.0
barrier()
for call in (basics.mpi_threads_supported, basics.stop_timeline,
             lambda: basics.start_timeline("/tmp/x", mark_cycles=True)):
    try:
        call()
        raise SystemExit("no error")
    except ValueError as error:
        assert "MPI is not enabled" in str(error) or "HOROVOD_TIMELINE" in str(error)
basics.shutdown()
basics.shutdown()
assert basics.is_initialized() is False
try:
    allreduce(1.0)
    raise SystemExit("no error")
except HorovodInternalError as error:
    assert "call init()" in str(error)
basics.init()
assert allreduce(6.0) == 6.0
""")
    )


@pytest.mark.parametrize("name", STARTERS)
def test_processes_of_another_starter_refuse_to_train_alone(name):
    script = """
try:
    basics.init()
    print("started", basics.size())
except HorovodInternalError as error:
    print(error)
"""
    told = good(alone(script, **{name: "4"}))
    assert f"{name}=4" in told and "horovodrun -np 4" in told
    assert good(alone(script, **{name: "1"})) == "started 1\n"


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "4"}, "HOROVOD_SIZE=4 but HOROVOD_STORE is not set"),
        ({"HOROVOD_STORE": "unix:/nowhere/store.sock"}, "HOROVOD_JOB_KEY_FILE"),
        (
            {
                "HOROVOD_STORE": "unix:/nowhere/store.sock",
                "HOROVOD_JOB_KEY_FILE": "/nowhere/job.key",
                "HOROVOD_JOB_ID": "0" * 16,
            },
            "/nowhere/job.key",
        ),
        ({"HOROVOD_CONTROLLER": "mpi"}, "HOROVOD_CONTROLLER=mpi"),
        ({"HOROVOD_CPU_OPERATIONS": "mpi"}, "HOROVOD_CPU_OPERATIONS=mpi"),
        ({"HOROVOD_SIMD": "mmx"}, "HOROVOD_SIMD=mmx"),
        ({"HOROVOD_FUSION_THRESHOLD": "much"}, "HOROVOD_FUSION_THRESHOLD=much"),
    ],
)
def test_a_bad_environment_is_one_clear_error_and_init_can_be_called_again(environment, words):
    told = good(
        alone(
            """
import os
try:
    basics.init()
    raise SystemExit("no error")
except (HorovodInternalError, ValueError) as error:
    print(error)
assert not basics.is_initialized()
for name in list(os.environ):
    if name.startswith("HOROVOD_"):
        del os.environ[name]
basics.init()
assert allreduce(1.0) == 1.0
""",
            **environment,
        )
    )
    assert words in told


def test_communicators_other_than_all_ranks_are_refused(ranks):
    ranks.run(
        """
for comm, words in [([0], "only None or all ranks, 0 to 1"), (7, "MPI communicators"),
                    ([0, 0], "only None"), ([0, 1, 2], "only None")]:
    try:
        basics.init(comm=comm)
        raise SystemExit("accepted")
    except ValueError as error:
        assert words in str(error), error
basics.init(comm=range(2))
basics.init(comm=[1, 0])
try:
    basics.init(comm=[1])
    raise SystemExit("accepted")
except ValueError:
    pass
assert allreduce(1.0) == 2.0
""",
        2,
    )


def test_placement_and_hosts(ranks):
    ended = ranks.run(
        """
basics.init()
print(basics.rank(), basics.size(), basics.is_homogeneous(), basics.host_of(2))
barrier()
basics.shutdown()
""",
        3,
        hosts="aab",
    )
    assert [e.stdout for e in ended] == [f"{rank} 3 False b\n" for rank in range(3)]


def test_init_in_a_thread_and_from_many_threads_at_once(ranks):
    ranks.run(
        """
threads = [threading.Thread(target=basics.init) for _ in range(5)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert allreduce(1.0) == 2.0
thread = threading.Thread(target=basics.shutdown)
thread.start(); thread.join()
assert not basics.is_initialized()
""",
        2,
    )


CYCLES = """
def measure():
    deadline = time.monotonic() + 2  # the kernel lists a joined thread a moment longer
    while len(os.listdir("/proc/self/task")) > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    with open("/proc/self/maps") as maps: count = len(maps.readlines())
    with open("/proc/self/status") as status:
        rss = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), count, rss

for cycle in range(150):
    basics.init()
    assert basics.size() == int(os.environ["HOROVOD_SIZE"])
    for k in range(3):
        assert allreduce(1.0 + k, str(k)) == (1.0 + k) * basics.size()
    basics.shutdown()
    if cycle == 10:
        early = measure()
late = measure()
assert late[:2] == early[:2], (early, late)
assert late[2] <= early[2] + 2, (early, late)
assert late[3] < early[3] + 2048, (early, late)
"""


@pytest.mark.parametrize("size", [1, 2])
def test_150_times_init_and_shutdown_leave_nothing(ranks, size):
    ranks.run(CYCLES, size)
    assert sorted(os.listdir(ranks.job.directory)) == ["job.key", "store.sock"]


def test_a_missing_rank_is_named(ranks):
    ranks.start(
        """
from horovod.common.store import StoreClient, read_key
settings = basics.config.from_environ()
if settings.rank == 1:
    sys.exit(0)
# The clock starts when both are there, however slowly processes start.
store = StoreClient(settings.store, read_key(settings.job_key_file), settings.job_id, settings.rank)
store.set(f"ready/{settings.rank}", b"")
store.get(f"ready/{2 - settings.rank}", 20)
basics.init()
""",
        3,
        HOROVOD_START_TIMEOUT="3",
    )
    ended = ranks.end()
    assert [e.code for e in ended] == [1, 0, 1]
    assert "rank 1 of 3 did not join 'init'" in ended[0].stderr


def test_no_descriptors_for_init_is_a_typed_error(ranks):
    ranks.start(
        """
import resource
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
if basics.config.from_environ().rank == 1:
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 4, hard))
try:
    basics.init()
    allreduce(1.0)
except ResourceError as error:
    print("refused", error)
except HorovodInternalError as error:
    print("told", error)
""",
        2,
        HOROVOD_START_TIMEOUT="5",
    )
    ended = ranks.end()
    assert ended[1].stdout.startswith("refused") and "ulimit -n" in ended[1].stdout, ended[1]
    assert ended[0].stdout.startswith("told"), ended[0]


def test_the_log_layout_follows_the_settings():
    script = """
import logging
basics.init()
log = logging.getLogger("horovod")
log.debug("hidden"); log.info("an info"); log.warning("a warning"); log.critical("the end")
"""
    ended = alone(script, HOROVOD_LOG_LEVEL="info")
    stamp = r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}: "
    import re

    assert re.fullmatch(stamp + r"I <string>:\d+\] \[0\]: an info\n", ended.stdout)
    assert re.fullmatch(
        stamp
        + r"W <string>:\d+\] \[0\]: a warning\n"
        + stamp
        + r"F <string>:\d+\] \[0\]: the end\n",
        ended.stderr,
    )
    ended = alone(script, HOROVOD_LOG_HIDE_TIME="1")
    assert ended.stdout == ""
    assert re.fullmatch(
        r"\[W <string>:\d+\] \[0\]: a warning\n\[F <string>:\d+\].*\n", ended.stderr
    )


def test_a_stall_warning_of_the_engine_is_logged(ranks):
    ended = ranks.run(
        """
basics.init()
if basics.rank() == 1:
    time.sleep(2)
assert allreduce(1.0, "late") == 2.0
basics.shutdown()
""",
        2,
        HOROVOD_STALL_CHECK_TIME_SECONDS="1",
    )
    warnings = "".join(e.stderr for e in ended)
    assert "late" in warnings and ": W " in warnings and "[0]: " in warnings


def test_a_world_that_is_idle_sleeps(ranks):
    ranks.run(
        """
def switches():
    total = 0
    for task in os.listdir("/proc/self/task"):
        if int(task) != os.getpid():
            with open(f"/proc/self/task/{task}/status") as status:
                total += sum(int(l.split()[1]) for l in status if "ctxt_switches" in l)
    return total
basics.init()
for k in range(100):
    allreduce(1.0)
barrier()
time.sleep(0.2)
before = switches()
time.sleep(1)
used = switches() - before
assert used < 5, used
barrier()
basics.shutdown()
""",
        2,
    )
