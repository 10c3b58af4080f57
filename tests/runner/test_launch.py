"""``horovodrun`` with real processes: what they get, what they write, and how they are placed."""

from __future__ import annotations

import json
import os
import resource
import socket
import stat
import sys
import time
from pathlib import Path

import pytest

from horovod.common import config
from horovod.runner.placement import is_local

SHOW_PLACE = "echo $HOROVOD_RANK/$HOROVOD_SIZE $HOROVOD_LOCAL_RANK/$HOROVOD_LOCAL_SIZE"
SHOW_ALL = SHOW_PLACE + " $HOROVOD_CROSS_RANK/$HOROVOD_CROSS_SIZE $HOROVOD_HOSTNAME"

# Writes its arguments and environment, byte for byte, to a file.
DUMP = """
import os, pickle, sys
name = os.path.join(sys.argv[1], os.environ["HOROVOD_RANK"])
with open(name, "wb") as file:
    pickle.dump(([os.fsencode(a) for a in sys.argv[2:]], dict(os.environb)), file)
"""


def places(out: bytes) -> list[str]:
    return sorted(line.partition(":")[2] for line in out.decode().splitlines())


def test_exactly_np_ranks_start(launcher) -> None:
    result = launcher.run("-np", "2", "-H", "localhost:4", "sh", "-c", SHOW_ALL)
    assert result.returncode == 0
    assert places(result.stdout) == ["0/2 0/2 0/1 localhost", "1/2 1/2 0/1 localhost"]
    assert result.stderr == b""


def test_two_names_of_this_machine_are_two_hosts(launcher) -> None:
    hosts = "localhost:2,127.0.0.1:2"
    result = launcher.run("-np", "4", "-H", hosts, "sh", "-c", SHOW_ALL)
    assert places(result.stdout) == [
        "0/4 0/2 0/2 localhost",
        "1/4 1/2 0/2 localhost",
        "2/4 0/2 1/2 127.0.0.1",
        "3/4 1/2 1/2 127.0.0.1",
    ]


def test_a_host_file(launcher, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# mine\n\nlocalhost slots=1 max_slots=4\r\n127.0.0.1\n")
    result = launcher.run("-np", "2", "-hostfile", str(path), "sh", "-c", SHOW_ALL)
    assert places(result.stdout) == ["0/2 0/1 0/2 localhost", "1/2 0/1 1/2 127.0.0.1"]


def test_local_names_need_no_ssh(launcher, tmp_path: Path) -> None:
    fake = tmp_path / "ssh"
    fake.write_text(f"#!/bin/sh\ntouch {tmp_path}/called\n")
    fake.chmod(0o755)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
            own = probe.getsockname()[0]
        except OSError:  # no route: this machine has no other address
            own = "127.0.0.1"
    for name in ("localhost", "127.0.0.1", "[::1]", socket.gethostname(), own):
        result = launcher.run(
            "-np", "1", "-H", f"{name}:1", "/bin/sh", "-c", SHOW_PLACE, env={"PATH": str(tmp_path)}
        )
        assert (result.returncode, result.stdout) == (0, b"[0]<stdout>:0/1 0/1\n"), name
    assert not (tmp_path / "called").exists()


def test_a_remote_host_is_refused_in_one_line(launcher) -> None:
    start = time.monotonic()
    result = launcher.run("-np", "2", "-H", "localhost:1,192.0.2.7:1", "true")
    assert result.returncode == 2
    assert result.stderr.count(b"\n") == 1
    assert b"remote hosts are not supported yet: 192.0.2.7" in result.stderr
    assert time.monotonic() - start < 5


def test_a_name_that_does_not_resolve_is_not_waited_for() -> None:
    start = time.monotonic()
    assert not is_local("no-such-host.invalid", start + 0.5)
    assert time.monotonic() - start < 2


@pytest.mark.parametrize(
    "words",
    [
        ["-np", "2", "--mpi", "true"],
        ["-np", "2", "--jsrun", "true"],
        ["-np", "2", "--min-np", "1", "true"],
        ["-np", "2", "--host-discovery-script", "x", "true"],
        ["-np", "2", "-H", "localhost:1", "true"],
        ["-np", "2", "-H", "localhost:x", "true"],
        ["-np", "0", "true"],
        ["-np", "2"],
        ["-np", "2", "--fusion-threshold-mb", "-1", "true"],
        ["-np", "2", "-hostfile", "/nonexistent", "true"],
    ],
    ids=" ".join,
)
def test_wrong_requests_end_in_one_line(launcher, words: list[str]) -> None:
    result = launcher.run(*words)
    assert (result.returncode, result.stdout) == (2, b"")
    assert result.stderr.startswith(b"horovodrun: ")
    assert result.stderr.count(b"\n") == 1


def test_a_bad_variable_is_named_before_anything_starts(launcher) -> None:
    result = launcher.run("-np", "2", "echo", "x", env={"HOROVOD_CYCLE_TIME": "fast"})
    assert (result.returncode, result.stdout) == (2, b"")
    assert b"HOROVOD_CYCLE_TIME=fast: a number from 0 to 60000 is accepted" in result.stderr


def test_one_warning_for_what_has_no_effect_yet(launcher) -> None:
    words = ["--autotune", "--ssh-port", "22", "--gloo"]
    result = launcher.run("-np", "2", *words, "true", env={"HOROVOD_TIMELINE": "/tmp/t"})
    assert result.returncode == 0
    assert result.stderr.decode().splitlines() == [
        "horovodrun: warning: these have no effect yet: --ssh-port, --autotune, HOROVOD_TIMELINE"
    ]


ARGUMENTS = [
    b"a b",
    b"'quoted' \"twice\"",
    b"$HOME",
    b"`id`",
    b"*",
    b";",
    b"new\nline",
    b"",
    "\u00fcml\u00e4ut".encode(),
    b"\xff\xfe",
    b"--",
    b"-np",
    b"\\",
    b"tab\t",
]


def test_arguments_and_environment_are_byte_equal(launcher, tmp_path: Path) -> None:
    import pickle

    script = tmp_path / "dump.py"
    script.write_text(DUMP)
    given = {os.fsencode(k): os.fsencode(v) for k, v in launcher.environment().items()}
    given |= {
        b"FOO.BAR": b"1",
        b"BASH_FUNC_say%%": b"() {  echo said\n}",
        b"A": b"x y'\"$",
        b"LARGE": b"v" * 100_000,
        b"\xffname": b"\xfevalue\n",
        b"EMPTY": b"",
        b"CUDA_VISIBLE_DEVICES": b"7",
        b"OLDPWD": b"/x",
        b"HOROVOD_RANK": b"5",
        b"HOROVOD_SIZE": b"9",
        b"HOROVOD_LOCAL_RANK": b"5",
        b"HOROVOD_JOB_ID": b"outer",
        b"HOROVOD_STORE": b"unix:/outer",
        b"OMP_NUM_THREADS": b"3",
    }
    word = [os.fsencode(sys.executable), b"-m", b"horovod.runner", b"-np", b"2"]
    import subprocess

    result = subprocess.run(
        [*word, os.fsencode(sys.executable), bytes(script), bytes(tmp_path), *ARGUMENTS],
        env=given,
        capture_output=True,
        timeout=30,
    )
    assert (result.returncode, result.stderr) == (0, b"")
    documented = {knob.env.encode() for knob in config.KNOBS if knob.env} | {b"PYTHONUNBUFFERED"}
    for rank in range(2):
        arguments, environ = pickle.loads((tmp_path / str(rank)).read_bytes())
        assert arguments == ARGUMENTS
        added = {name for name in environ if environ[name] != given.get(name)}
        assert added <= documented
        assert {name: environ.get(name) for name in given if name not in added} == {
            name: text for name, text in given.items() if name not in added
        }
        assert environ[b"HOROVOD_RANK"] == str(rank).encode()
        assert environ[b"HOROVOD_SIZE"] == b"2"
        assert environ[b"HOROVOD_JOB_ID"] != b"outer"
        assert environ[b"HOROVOD_STORE"] != b"unix:/outer"
        assert environ[b"PYTHONUNBUFFERED"] == b"1"


def test_an_exported_function_survives(launcher) -> None:
    words = [
        "-c",
        f'say() {{ echo "said $1"; }}; export -f say; {sys.executable} -m horovod.runner'
        " -np 1 bash -c 'say it'",
    ]
    result = launcher.run(*words, program=("bash",))
    assert result.stdout == b"[0]<stdout>:said it\n"


def grown(megabytes: int) -> str:
    """A program that lets its environment grow and then runs horovodrun in itself."""
    return (
        "import os, sys\n"
        f"for i in range({megabytes} * 10): os.environ[f'LARGE{{i}}'] = 'v' * 100_000\n"
        "from horovod.runner.launch import run_commandline\n"
        "sys.exit(run_commandline(sys.argv[1:]))\n"
    )


def test_a_large_environment_needs_a_larger_stack_limit(launcher) -> None:
    words = ["-c", grown(3), "-np", "1", "sh", "-c", "echo ${#LARGE29}"]
    small = launcher.run(*words, program=("prlimit", "--stack=8388608", sys.executable))
    assert (small.returncode, small.stdout) == (126, b"")
    text = small.stderr.decode()
    assert text.count("\n") == 1
    assert "too large" in text
    assert "takes 2097152 bytes" in text
    assert "ulimit -s" in text
    large = launcher.run(*words, program=("prlimit", "--stack=33554432", sys.executable))
    assert (large.returncode, large.stdout) == (0, b"[0]<stdout>:100000\n")


def test_one_argument_too_large(launcher) -> None:
    program = "import sys; from horovod.runner.launch import run_commandline as r; "
    words = ["-c", program + "sys.exit(r(['-np', '1', 'echo', 'x' * 200_000]))"]
    result = launcher.run(*words, program=(sys.executable,))
    assert result.returncode == 126
    assert b"argument 1 takes 200001 bytes, and the kernel takes at most 131072" in result.stderr


@pytest.mark.parametrize(
    ("name", "code", "text"),
    [
        ("no-such-command", 127, b"no-such-command: command not found"),
        ("{tmp}/plain", 126, b"permission denied"),
        ("{tmp}/nohead", 126, b"neither a program nor a script"),
    ],
)
def test_commands_that_cannot_run(launcher, tmp_path, name: str, code: int, text: bytes) -> None:
    (tmp_path / "plain").write_text("x")
    (tmp_path / "nohead").write_text("echo x")
    (tmp_path / "nohead").chmod(0o755)
    result = launcher.run("-np", "2", name.format(tmp=tmp_path))
    assert result.returncode == code
    assert text in result.stderr
    assert result.stderr.count(b"\n") == 1


def test_nothing_secret_is_in_sight(launcher, tmp_path: Path) -> None:
    show = (
        "import os, stat, json, sys\n"
        "file = os.environ['HOROVOD_JOB_KEY_FILE']\n"
        "key = open(file, 'rb').read()\n"
        "seen = b''\n"
        "for pid in filter(str.isdigit, os.listdir('/proc')):\n"
        "    for name in ('cmdline', 'environ'):\n"
        "        try: seen += open(f'/proc/{pid}/{name}', 'rb').read()\n"
        "        except OSError: pass\n"
        "shown = [key in seen, key.hex().encode() in seen]\n"
        "modes = [stat.S_IMODE(os.stat(p).st_mode) for p in (file, os.path.dirname(file))]\n"
        "tcp = [l for n in ('tcp', 'tcp6') for l in open(f'/proc/net/{n}') if ' 0A ' in l]\n"
        "inodes = {os.stat(f'/proc/{os.getppid()}/fd/{d}').st_ino\n"
        "          for d in os.listdir(f'/proc/{os.getppid()}/fd')}\n"
        "ours = [l for l in tcp if int(l.split()[9]) in inodes]\n"
        "print(json.dumps([len(key), shown, modes, ours, file]))\n"
    )
    result = launcher.run("-np", "1", sys.executable, "-c", show)
    assert result.returncode == 0, result.stderr
    size, shown, modes, listening, file = json.loads(result.stdout.partition(b":")[2])
    assert size == 32
    assert shown == [False, False]
    assert modes == [stat.S_IRUSR | stat.S_IWUSR, stat.S_IRWXU]
    assert listening == []
    assert not Path(file).exists()


def test_a_launch_inside_a_worker(launcher) -> None:
    inner = f"{sys.executable} -m horovod.runner -np 2 sh -c '{SHOW_PLACE}'"
    result = launcher.run("-np", "2", "sh", "-c", inner)
    assert result.returncode == 0
    found = sorted(result.stdout.splitlines())
    assert found == [
        f"[{outer}]<stdout>:[{rank}]<stdout>:{rank}/2 {rank}/2".encode()
        for outer in (0, 1)
        for rank in (0, 1)
    ]


def test_threads_are_shared_out(launcher) -> None:
    show = "echo ${OMP_NUM_THREADS-unset}"
    cores = len(os.sched_getaffinity(0))
    expected = str(max(1, cores // 2)).encode()
    result = launcher.run("-np", "2", "--verbose", "sh", "-c", show)
    assert result.stdout.count(b">:" + expected + b"\n") == 2
    assert b"OMP_NUM_THREADS=" + expected in result.stdout
    alone = launcher.run("-np", "1", "sh", "-c", show)
    assert alone.stdout == b"[0]<stdout>:unset\n"
    kept = launcher.run("-np", "2", "--verbose", "sh", "-c", show, env={"OMP_NUM_THREADS": "7"})
    assert kept.stdout.count(b">:7\n") == 2
    assert b"OMP_NUM_THREADS" not in kept.stdout


def test_precedence_is_shown_and_holds(launcher, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("params: {fusion_threshold_mb: 3, cycle_time_ms: 3, cache_capacity: 3}\n")
    names = ("FUSION_THRESHOLD", "CYCLE_TIME", "CACHE_CAPACITY", "STALL_CHECK_TIME_SECONDS")
    result = launcher.run(
        *("-np", "1", "--config-file", str(path), "--fusion-threshold-mb", "1", "--verbose"),
        *("sh", "-c", "echo " + ",".join(f"$HOROVOD_{name}" for name in names)),
        env={"HOROVOD_FUSION_THRESHOLD": "2", "HOROVOD_CYCLE_TIME": "2"},
    )
    assert result.returncode == 0
    lines = result.stdout.decode().splitlines()
    assert "[0]<stdout>:1048576,2,3," in lines
    for line in (
        "HOROVOD_FUSION_THRESHOLD=1048576 (flag --fusion-threshold-mb)",
        "HOROVOD_CYCLE_TIME=2 (environment)",
        "HOROVOD_CACHE_CAPACITY=3 (file: params.cache_capacity)",
        "HOROVOD_STALL_CHECK_TIME_SECONDS=60.0 (default)",
    ):
        assert f"horovodrun: {line}" in lines
    assert "Remote host found: " in lines
    assert "All hosts are local, finding the interfaces with address 127.0.0.1" in lines
    assert sum(line.startswith("Local interface found ") for line in lines) == 1


def test_check_build_and_version(launcher) -> None:
    import horovod

    result = launcher.run("-cb")
    assert result.returncode == 0
    assert result.stdout.startswith(f"Horovod v{horovod.__version__}:\n\nAvailable".encode())
    assert result.stdout.endswith(b"    [X] Gloo    \n")
    assert launcher.run("-cb", "--verbose").stdout == b"\n" + result.stdout
    assert launcher.run("-v").stdout == f"{horovod.__version__}\n".encode()


# --- output ---


def test_prefixes_and_streams(launcher) -> None:
    script = r"printf 'a\r20%%\rb\n\377\nlast'; printf 'oops\nend' >&2"
    result = launcher.run("-np", "1", "sh", "-c", script)
    assert result.stdout == b"".join(
        b"[0]<stdout>:" + line for line in (b"a\r", b"20%\r", b"b\n", b"\xff\n", b"last\n")
    )
    assert result.stderr == b"[0]<stderr>:oops\n[0]<stderr>:end\n"


def test_lines_come_at_once(launcher) -> None:
    process = launcher.start("-np", "1", "sh", "-c", "echo first; sleep 30")
    start = time.monotonic()
    assert process.stdout.readline() == b"[0]<stdout>:first\n"
    assert time.monotonic() - start < 10
    process.terminate()
    assert process.wait(15) == 143


def test_timestamps(launcher) -> None:
    result = launcher.run("-np", "1", "-prefix-timestamp", "echo", "x")
    stamp, bracket, rest = result.stdout.decode().partition("[")
    time.strptime(stamp)
    assert bracket + rest == "[0]<stdout>:x\n"


@pytest.mark.parametrize("size", [1, 2])
def test_files_hold_what_the_console_shows(launcher, tmp_path: Path, size: int) -> None:
    directory = tmp_path / "deep" / "out"
    result = launcher.run(
        *("-np", str(size), "--output-filename", str(directory)),
        *("sh", "-c", "echo out $HOROVOD_RANK; echo err >&2"),
    )
    assert result.returncode == 0
    for rank in range(size):
        folder = directory / f"rank.{rank}"
        assert (folder / "stdout").read_text() == f"[{rank}]<stdout>:out {rank}\n"
        assert (folder / "stderr").read_text() == f"[{rank}]<stderr>:err\n"
        assert f"[{rank}]<stdout>:out {rank}\n".encode() in result.stdout


def test_a_directory_that_cannot_be_made(launcher) -> None:
    result = launcher.run("-np", "1", "--output-filename", "/dev/null/x", "echo", "x")
    assert result.returncode == 1
    assert result.stdout == b""
    assert result.stderr.startswith(b"horovodrun: ")
    assert result.stderr.count(b"\n") == 1


def test_a_full_disk_does_not_end_the_job(launcher, tmp_path: Path) -> None:
    (tmp_path / "rank.0").mkdir()
    (tmp_path / "rank.0" / "stdout").symlink_to("/dev/full")
    result = launcher.run(
        *("-np", "1", "--output-filename", str(tmp_path)),
        *("sh", "-c", "echo one; sleep 0.2; echo two"),
    )
    assert result.returncode == 0
    assert result.stdout == b"[0]<stdout>:one\n[0]<stdout>:two\n"
    assert result.stderr.count(b"No space left on device") == 1


def test_much_output_is_complete_at_the_end(launcher) -> None:
    script = (
        "import sys; sys.stdout.write('x' * 99 + '\\n' * 1); sys.stdout.write(('y'*99+'\\n')*50000)"
    )
    result = launcher.run("-np", "2", sys.executable, "-c", script)
    assert result.returncode == 0
    lines = result.stdout.split(b"\n")
    assert lines.count(b"[0]<stdout>:" + b"y" * 99) == 50_000
    assert lines.count(b"[1]<stdout>:" + b"y" * 99) == 50_000


def test_a_closed_stdout_does_not_end_the_job(launcher, tmp_path: Path) -> None:
    script = f"for i in 1 2 3 4 5; do echo $i; sleep 0.1; done; touch {tmp_path}/done; exit 3"
    process = launcher.start("-np", "1", "sh", "-c", script)
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(20) == 3
    text = process.stderr.read()
    assert text.count(b"stdout: Broken pipe") == 1
    assert (tmp_path / "done").exists()


def test_no_standard_streams_at_all(launcher, tmp_path: Path) -> None:
    for number, closed in enumerate((">&-", "2>&-", "<&-", "<&- >&- 2>&-")):
        mark = tmp_path / f"ran{number}"
        command = f"{sys.executable} -m horovod.runner -np 2 sh -c 'echo x; touch {mark}' {closed}"
        result = launcher.run("-c", command, program=("sh",))
        assert result.returncode == 0, (closed, result)
        assert mark.exists()


def test_a_console_that_takes_nothing_can_be_left(launcher) -> None:
    process = launcher.start("-np", "1", "sh", "-c", "yes")
    time.sleep(1)  # its pipe, the backlog and the worker's pipe are full now
    process.terminate()
    assert process.wait(15) == 143


def test_a_slow_console_gets_all_of_it(launcher) -> None:
    lines = 200_000
    script = f"import sys; sys.stdout.write('{'z' * 49}\\n' * {lines})"
    process = launcher.start("-np", "1", sys.executable, "-c", script)
    time.sleep(1)
    assert process.poll() is None
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert out == (b"[0]<stdout>:" + b"z" * 49 + b"\n") * lines


def test_start_up_is_short(launcher) -> None:
    """In time of the processor, which a busy machine does not change: about 0.25 s."""
    launcher.run("-np", "2", "true")  # compiles what isn't yet

    def spent() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    costs = []
    for _ in range(5):
        before = spent()
        assert launcher.run("-np", "2", "true").returncode == 0
        costs.append(spent() - before)
    assert min(costs) < 0.5


def test_an_idle_launcher_sleeps(launcher) -> None:
    process = launcher.start("-np", "2", "sh", "-c", "echo x; exec sleep 60")
    process.stdout.readline()
    process.stdout.readline()
    group = [process.pid, *children(process.pid)]

    def switches() -> int:
        total = 0
        for pid in group:
            for task in os.listdir(f"/proc/{pid}/task"):
                text = Path(f"/proc/{pid}/task/{task}/status").read_text()
                total += sum(int(line.split()[1]) for line in text.splitlines() if "ctxt" in line)
        return total

    time.sleep(0.5)  # let it settle
    before = switches()
    time.sleep(3)
    assert switches() - before <= 6
    process.terminate()
    assert process.wait(15) == 143


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    found = [int(word) for word in text.split()]
    return found + [child for one in found for child in children(one)]
