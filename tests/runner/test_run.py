"""``horovod.run``: functions, results and failures across processes."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

import horovod


@pytest.fixture(autouse=True)
def directory(tmp_path_factory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary directory for the job, which must be empty again afterwards."""
    import tempfile

    tmp_path_factory.getbasetemp()  # before the place for temporary files moves
    with tempfile.TemporaryDirectory(prefix="hvd") as name:
        monkeypatch.setenv("TMPDIR", name)
        monkeypatch.setattr(tempfile, "tempdir", None)
        threads = set(threading.enumerate())
        descriptors = set(os.listdir("/proc/self/fd"))
        children = children_of_tests()
        yield Path(name)
        assert os.listdir(name) == []
        assert {t.name for t in set(threading.enumerate()) - threads} == set()
        assert set(os.listdir("/proc/self/fd")) == descriptors
        assert children_of_tests() <= children
    tempfile.tempdir = None


def children_of_tests() -> set[str]:
    """Those of this thread; worlds that other tests use may be among them."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def rank() -> int:
    return int(os.environ["HOROVOD_RANK"])


def test_signature() -> None:
    names = (
        "func args kwargs num_proc min_num_proc max_num_proc slots reset_limit cooldown_range "
        "hosts hostfile host_discovery_script start_timeout ssh_port ssh_identity_file "
        "disable_cache output_filename verbose use_gloo use_mpi mpi_args network_interface "
        "network_interfaces executable np min_np max_np"
    )
    parameters = inspect.signature(horovod.run).parameters
    assert " ".join(parameters) == names
    defaults = {"args": (), "num_proc": 1}
    for name, parameter in parameters.items():
        if name != "func":
            assert parameter.default == defaults.get(name)


def test_results_come_in_rank_order() -> None:
    offset = 10

    def place(a: int, b: int = 0) -> tuple[int, int, str]:
        import os
        import time

        rank = int(os.environ["HOROVOD_RANK"])
        time.sleep(0.2 * (2 - rank))
        return rank, a + b + offset, os.environ["HOROVOD_SIZE"]

    assert horovod.run(place, (1,), {"b": 2}, num_proc=3) == [(r, 13, "3") for r in range(3)]


def test_a_lambda_in_one_process() -> None:
    assert horovod.run(lambda: 7) == [7]


def test_a_large_result() -> None:
    size = 200 << 20
    results = horovod.run(lambda: bytes(200 << 20), num_proc=2)
    assert [len(result) for result in results] == [size, size]


def test_an_exception_comes_with_its_traceback() -> None:
    def failing() -> None:
        import os
        import time

        if os.environ["HOROVOD_RANK"] == "1":
            raise KeyError("boom")
        time.sleep(30)

    with pytest.raises(RuntimeError) as caught:
        horovod.run(failing, num_proc=2)
    text = str(caught.value)
    assert "Horovod detected that one or more processes exited with non-zero status" in text
    assert "Process name: 1\nExit code: 1\n" in text
    assert "Traceback (most recent call last)" in text
    assert "in failing" in text
    assert text.rstrip().endswith("KeyError: 'boom'")


def test_sys_exit() -> None:
    def leave(code: int) -> None:
        sys.exit(code)

    assert horovod.run(leave, (0,), num_proc=2) == [None, None]
    with pytest.raises(RuntimeError, match="Exit code: 3"):
        horovod.run(leave, (3,), num_proc=1)


def test_no_result_at_all() -> None:
    def vanish() -> int:
        import os

        if os.environ["HOROVOD_RANK"] == "1":
            os._exit(0)
        return 1

    with pytest.raises(RuntimeError, match=r"ranks \[1\] ended normally, but without a result"):
        horovod.run(vanish, num_proc=2)


def test_a_forked_child_holds_no_connection_and_gives_no_result() -> None:
    def fork() -> list[str]:
        sockets = []
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            for name in os.listdir("/proc/self/fd"):
                try:
                    sockets.append(os.readlink(f"/proc/self/fd/{name}"))
                except FileNotFoundError:
                    continue
            os.write(write, "\n".join(sockets).encode())
            sys.exit(0)  # goes up to where the task waits for the result
        os.waitpid(child, 0)
        return [line for line in os.read(read, 65536).decode().split("\n") if "socket" in line]

    assert horovod.run(fork, num_proc=1) == [[]]


def test_what_cannot_be_pickled() -> None:
    lock = threading.Lock()
    with pytest.raises(ValueError, match="can't be pickled"):
        horovod.run(lambda: lock)

    def gives_a_lock() -> object:
        import threading

        return threading.Lock()

    with pytest.raises(RuntimeError, match="the result, a lock, can't be pickled"):
        horovod.run(gives_a_lock)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"hosts": "localhost:2", "hostfile": "f"}, "hosts or hostfile"),
        ({"use_gloo": True, "use_mpi": True}, "use_gloo or use_mpi"),
        ({"use_mpi": True}, "--mpi: MPI is not supported"),
        ({"min_num_proc": 1}, "--min-np: elastic jobs are not supported"),
        ({"host_discovery_script": "x"}, "elastic jobs are not supported"),
        ({"hosts": "192.0.2.7:2"}, "remote hosts are not supported"),
        ({"hosts": "localhost:1"}, "2 processes need 2 slots"),
        ({"start_timeout": -1}, "--start-timeout"),
    ],
)
def test_arguments_that_do_not_work(options: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        horovod.run(lambda: 1, num_proc=2, **options)


def test_deprecated_names() -> None:
    with pytest.warns(DeprecationWarning, match="np is deprecated: use num_proc"):
        assert horovod.run(lambda: 1, np=2) == [1, 1]
    with pytest.warns(DeprecationWarning, match="network_interface is deprecated"):
        assert horovod.run(lambda: 1, network_interface="lo,eth0") == [1]
    with (
        pytest.warns(DeprecationWarning, match="min_np is deprecated"),
        pytest.raises(ValueError, match="elastic"),
    ):
        horovod.run(lambda: 1, min_np=1)


def test_no_variable_that_was_not_asked_for() -> None:
    def variables() -> set[str]:
        import os

        return {name for name in os.environ if name.startswith("HOROVOD_")}

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        names = horovod.run(variables)[0]
    assert names == {
        *(f"HOROVOD_{p}{n}" for p in ("", "LOCAL_", "CROSS_") for n in ("RANK", "SIZE")),
        *(f"HOROVOD_{n}" for n in ("HOSTNAME", "STORE", "JOB_ID", "JOB_KEY_FILE")),
        "HOROVOD_CONTROLLER",
        "HOROVOD_CPU_OPERATIONS",
    }


def test_output_is_forwarded(capfd: pytest.CaptureFixture[str]) -> None:
    horovod.run(lambda: print("hello"), num_proc=2)
    assert sorted(capfd.readouterr().out.splitlines()) == [
        "[0]<stdout>:hello",
        "[1]<stdout>:hello",
    ]


def test_output_where_there_is_no_descriptor(capsys: pytest.CaptureFixture[str]) -> None:
    horovod.run(lambda: print("hello"))
    assert capsys.readouterr().out == "[0]<stdout>:hello\n"


def test_it_works_in_a_thread() -> None:
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.extend(horovod.run(lambda: 5, num_proc=2)))
    thread.start()
    thread.join(30)
    assert results == [5, 5]


def test_an_interrupt_ends_the_job() -> None:
    program = (
        "import horovod, os, signal, threading, time\n"
        "def call():\n"
        "    print('up', flush=True)\n"
        "    time.sleep(300)\n"
        "try:\n"
        "    horovod.run(call, num_proc=2)\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted', flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout is not None
    for _ in range(2):
        process.stdout.readline()
    process.send_signal(2)
    out, _ = process.communicate(timeout=20)
    assert out.endswith(b"interrupted\n")


SCRIPT = """
import horovod

class Box:
    def __init__(self, content):
        self.content = content

def fill(box):
    return Box(box.content + 1)

for box in horovod.run(fill, (Box(1),), num_proc=2):
    print(type(box) is Box, box.content)
"""


@pytest.mark.parametrize("form", ["script", "stdin"])
def test_classes_of_main(tmp_path: Path, form: str) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    words = [sys.executable, str(path) if form == "script" else "-"]
    result = subprocess.run(words, input=SCRIPT.encode(), capture_output=True, timeout=30)
    assert result.stderr == b""
    assert result.stdout == b"True 2\nTrue 2\n"


def test_modules_beside_the_script_are_found(tmp_path: Path) -> None:
    (tmp_path / "launch.py").write_text("def f():\n    return 'mine'\n")
    (tmp_path / "script.py").write_text(
        "import horovod, launch\nprint(horovod.run(launch.f, num_proc=1))\n"
    )
    words = [sys.executable, str(tmp_path / "script.py")]
    result = subprocess.run(words, capture_output=True, timeout=30, cwd="/")
    assert (result.stdout, result.stderr) == (b"['mine']\n", b"")
