"""The command line and the configuration file: everything parses, and says what comes of it."""

from __future__ import annotations

import argparse
import importlib.util
import re
from pathlib import Path

import pytest

from horovod.common import config
from horovod.common.config import KNOBS, Effect, Knob
from horovod.runner.launch import check_build, check_supported, make_parser, parse_args

NAMES = [
    "num_proc",
    "check_build",
    "disable_cache",
    "start_timeout",
    "nics",
    "output_filename",
    "verbose",
    "command",
    "config_file",
    "ssh_port",
    "ssh_identity_file",
    "fusion_threshold_mb",
    "cycle_time_ms",
    "cache_capacity",
    "hierarchical_allreduce",
    "hierarchical_allgather",
    "torus_allreduce",
    "autotune",
    "autotune_log_file",
    "autotune_warmup_samples",
    "autotune_steps_per_sample",
    "autotune_bayes_opt_max_samples",
    "autotune_gaussian_process_noise",
    "min_num_proc",
    "max_num_proc",
    "slots",
    "elastic_timeout",
    "reset_limit",
    "cooldown_range",
    "timeline_filename",
    "timeline_mark_cycles",
    "no_stall_check",
    "stall_check_warning_time_seconds",
    "stall_check_shutdown_time_seconds",
    "mpi_threads_disable",
    "mpi_args",
    "tcp_flag",
    "binding_args",
    "num_nccl_streams",
    "thread_affinity",
    "gloo_timeout_seconds",
    "log_level",
    "log_with_timestamp",
    "prefix_output_with_timestamp",
    "hosts",
    "hostfile",
    "host_discovery_script",
    "use_gloo",
    "use_mpi",
    "use_jsrun",
    "run_func",
    "executable",
]

# Option, attribute, value, and the variable it is exported under.
OPTIONS = [
    ("--fusion-threshold-mb 10", "fusion_threshold_mb", 10, "HOROVOD_FUSION_THRESHOLD=10485760"),
    ("--cycle-time-ms 20", "cycle_time_ms", 20.0, "HOROVOD_CYCLE_TIME=20.0"),
    ("--cache-capacity 512", "cache_capacity", 512, "HOROVOD_CACHE_CAPACITY=512"),
    (
        "--hierarchical-allreduce",
        "hierarchical_allreduce",
        True,
        "HOROVOD_HIERARCHICAL_ALLREDUCE=1",
    ),
    (
        "--no-hierarchical-allreduce",
        "hierarchical_allreduce",
        False,
        "HOROVOD_HIERARCHICAL_ALLREDUCE=0",
    ),
    (
        "--hierarchical-allgather",
        "hierarchical_allgather",
        True,
        "HOROVOD_HIERARCHICAL_ALLGATHER=1",
    ),
    (
        "--no-hierarchical-allgather",
        "hierarchical_allgather",
        False,
        "HOROVOD_HIERARCHICAL_ALLGATHER=0",
    ),
    ("--torus-allreduce", "torus_allreduce", True, "HOROVOD_TORUS_ALLREDUCE=1"),
    ("--no-torus-allreduce", "torus_allreduce", False, "HOROVOD_TORUS_ALLREDUCE=0"),
    ("--autotune", "autotune", True, "HOROVOD_AUTOTUNE=1"),
    ("--no-autotune", "autotune", False, "HOROVOD_AUTOTUNE=0"),
    ("--autotune-log-file f", "autotune_log_file", "f", ""),
    ("--autotune --autotune-log-file f", "autotune_log_file", "f", "HOROVOD_AUTOTUNE_LOG=f"),
    (
        "--autotune --autotune-warmup-samples 1",
        "autotune_warmup_samples",
        1,
        "HOROVOD_AUTOTUNE_WARMUP_SAMPLES=1",
    ),
    (
        "--autotune --autotune-steps-per-sample 5",
        "autotune_steps_per_sample",
        5,
        "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE=5",
    ),
    (
        "--autotune --autotune-bayes-opt-max-samples 9",
        "autotune_bayes_opt_max_samples",
        9,
        "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES=9",
    ),
    (
        "--autotune --autotune-gaussian-process-noise 0.5",
        "autotune_gaussian_process_noise",
        0.5,
        "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE=0.5",
    ),
    ("--min-np 1", "min_num_proc", 1, ""),
    ("--min-num-proc 1", "min_num_proc", 1, ""),
    ("--max-np 3", "max_num_proc", 3, ""),
    ("--max-num-proc 3", "max_num_proc", 3, ""),
    ("--slots-per-host 2", "slots", 2, ""),
    ("--elastic-timeout 9", "elastic_timeout", 9, ""),
    ("--reset-limit 9", "reset_limit", 9, ""),
    ("--blacklist-cooldown-range 1 5", "cooldown_range", [1, 5], ""),
    ("--timeline-filename t.json", "timeline_filename", "t.json", "HOROVOD_TIMELINE=t.json"),
    ("--timeline-mark-cycles", "timeline_mark_cycles", True, ""),
    (
        "--timeline-filename t --timeline-mark-cycles",
        "timeline_mark_cycles",
        True,
        "HOROVOD_TIMELINE_MARK_CYCLES=1",
    ),
    (
        "--timeline-filename t --no-timeline-mark-cycles",
        "timeline_mark_cycles",
        False,
        "HOROVOD_TIMELINE_MARK_CYCLES=0",
    ),
    ("--no-stall-check", "no_stall_check", True, "HOROVOD_STALL_CHECK_DISABLE=1"),
    ("--stall-check", "no_stall_check", False, "HOROVOD_STALL_CHECK_DISABLE=0"),
    (
        "--stall-check-warning-time-seconds 7",
        "stall_check_warning_time_seconds",
        7,
        "HOROVOD_STALL_CHECK_TIME_SECONDS=7",
    ),
    (
        "--stall-check-shutdown-time-seconds 8",
        "stall_check_shutdown_time_seconds",
        8,
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=8",
    ),
    ("--mpi-threads-disable", "mpi_threads_disable", True, "HOROVOD_MPI_THREADS_DISABLE=1"),
    ("--no-mpi-threads-disable", "mpi_threads_disable", False, "HOROVOD_MPI_THREADS_DISABLE=0"),
    ("--mpi-args=-x", "mpi_args", "-x", ""),
    ("--tcp", "tcp_flag", True, ""),
    ("--binding-args x", "binding_args", "x", ""),
    ("--num-nccl-streams 2", "num_nccl_streams", 2, "HOROVOD_NUM_NCCL_STREAMS=2"),
    ("--thread-affinity 1", "thread_affinity", 1, "HOROVOD_THREAD_AFFINITY=1"),
    ("--gloo-timeout-seconds 60", "gloo_timeout_seconds", 60, "HOROVOD_GLOO_TIMEOUT_SECONDS=60"),
    ("--log-level INFO", "log_level", "INFO", "HOROVOD_LOG_LEVEL=INFO"),
    ("--log-without-timestamp", "log_with_timestamp", False, "HOROVOD_LOG_HIDE_TIME=1"),
    ("--log-with-timestamp", "log_with_timestamp", True, "HOROVOD_LOG_HIDE_TIME=0"),
    ("--log-hide-timestamp", "log_with_timestamp", False, "HOROVOD_LOG_HIDE_TIME=1"),
    ("--no-log-hide-timestamp", "log_with_timestamp", True, "HOROVOD_LOG_HIDE_TIME=0"),
    ("-prefix-timestamp", "prefix_output_with_timestamp", True, ""),
    ("--prefix-output-with-timestamp", "prefix_output_with_timestamp", True, ""),
    ("--start-timeout 5", "start_timeout", 5, "HOROVOD_START_TIMEOUT=5"),
    ("--network-interfaces a,b --network-interfaces c", "nics", {"a", "b", "c"}, ""),
    ("--network-interface a --network-interface b", "nics", {"a", "b"}, ""),
    ("--output-filename d", "output_filename", "d", ""),
    ("--verbose", "verbose", True, ""),
    ("-p 22", "ssh_port", 22, ""),
    ("--ssh-port 22", "ssh_port", 22, ""),
    ("-i f", "ssh_identity_file", "f", ""),
    ("--ssh-identity-file f", "ssh_identity_file", "f", ""),
    ("-H a:1", "hosts", "a:1", ""),
    ("--hosts a:1", "hosts", "a:1", ""),
    ("-hostfile f", "hostfile", "f", ""),
    ("--hostfile f", "hostfile", "f", ""),
    ("--host-discovery-script s", "host_discovery_script", "s", ""),
    ("--gloo", "use_gloo", True, ""),
    ("--mpi", "use_mpi", True, ""),
    ("--jsrun", "use_jsrun", True, ""),
    ("--disable-cache", "disable_cache", True, ""),
    ("-cb", "check_build", True, ""),
    ("--check-build", "check_build", True, ""),
    ("--num-proc 3", "num_proc", 3, ""),
    ("-np 3", "num_proc", 3, ""),
]


def exported(args: argparse.Namespace) -> set[str]:
    given = {knob.name: getattr(args, knob.name, None) for knob in KNOBS}
    pairs = config.exports(given, args.from_file, {})
    return {f"{name.decode()}={text.decode()}" for name, text in pairs.items()}


@pytest.mark.parametrize(("words", "name", "value", "variable"), OPTIONS, ids=lambda v: str(v))
def test_every_option(words: str, name: str, value: object, variable: str) -> None:
    args = parse_args(["-np", "2", *words.split(), "python", "train.py", "--verbose"])
    assert getattr(args, name) == value
    assert args.command == ["python", "train.py", "--verbose"]
    assert exported(args) >= ({variable} if variable else set())
    if not variable:
        assert not any(text for text in exported(args) if name.upper() in text)


def test_the_list_above_is_complete() -> None:
    tested = {word for words, *_ in OPTIONS for word in words.replace("=", " ").split()}
    for knob in KNOBS:
        for flag in knob.flags + knob.off_flags:
            assert flag in tested or flag == "--config-file"


def test_attribute_names() -> None:
    args = parse_args(["-np", "2"])
    assert [name for name in NAMES if not hasattr(args, name)] == []
    assert exported(args) == set()


def test_abbreviations_and_double_dash() -> None:
    assert parse_args(["--num-p", "2", "--verb"]).verbose
    assert parse_args(["-n", "2"]).num_proc == 2
    assert parse_args(["-np", "2", "--", "cmd", "--", "-np"]).command == ["cmd", "--", "-np"]
    assert parse_args(["-np", "2", "cmd", "--", "-x", ""]).command == ["cmd", "--", "-x", ""]


@pytest.mark.parametrize(
    "words",
    [
        "",
        "python train.py",
        "-np x",
        "-np",
        "-np 2 --nonsense",
        "-np 2 -H a:1 -hostfile f",
        "-np 2 -H a:1 --host-discovery-script s",
        "-np 2 --gloo --mpi",
        "-np 2 --mpi --jsrun",
        "-np 2 -prefix-timestamp --log-with-timestamp",
        "-np 2 --log-level info",
        "-np 2 --autot",
    ],
)
def test_usage_errors(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_args(words.split())
    assert caught.value.code == 2
    assert "usage: horovodrun" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        "--fusion-threshold-mb -1",
        "--fusion-threshold-mb 99999999999999",
        "--cycle-time-ms -1",
        "--cycle-time-ms nan",
        "--cache-capacity -1",
        "--autotune-warmup-samples -1",
        "--autotune-steps-per-sample -1",
        "--autotune-bayes-opt-max-samples -1",
        "--autotune-gaussian-process-noise -0.1",
        "--autotune-gaussian-process-noise 1.1",
        "--stall-check-warning-time-seconds -1",
        "--stall-check-shutdown-time-seconds -1",
        "--num-nccl-streams -1",
        "--thread-affinity -1",
        "--gloo-timeout-seconds -1",
        "--start-timeout -1",
    ],
)
def test_numbers_out_of_range(words: str) -> None:
    with pytest.raises(ValueError, match=words.split()[0]):
        parse_args(["-np", "2", *words.split()])


def test_np_is_not_needed_to_check_the_build_or_under_lsf(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_args(["-cb"]).check_build
    monkeypatch.setenv("LSB_JOBID", "1")
    assert parse_args(["cmd"]).num_proc is None


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    import horovod

    for flag in ("-v", "--version"):
        with pytest.raises(SystemExit) as caught:
            parse_args([flag])
        assert caught.value.code == 0
        assert capsys.readouterr().out == horovod.__version__ + "\n"


def test_help_shows_every_main_flag() -> None:
    text = make_parser().format_help()
    for knob in KNOBS:
        assert all(flag in text for flag in knob.flags)
        assert not any(re.search(rf" {flag}(?![\w-])", text) for flag in knob.off_flags)


def test_an_interface_list_in_the_single_option_is_deprecated() -> None:
    with pytest.warns(DeprecationWarning, match="--network-interfaces"):
        args = parse_args(["-np", "2", "--network-interface", "a,b"])
    assert args.nics == {"a", "b"}


FILE = """
controller: gloo
params:
  fusion_threshold_mb: 32
  cycle_time_ms: 10
  cache_capacity: 2048
  hierarchical_allreduce: true
  hierarchical_allgather: true
  torus_allreduce: true
autotune:
  enabled: true
  log_file: "horovod_autotune_log.txt"
  warmup_samples: 5
  steps_per_sample: 20
  bayes_opt_max_samples: 50
  gaussian_process_noise: 0.9
timeline:
  filename: "horovod_timeline.json"
  mark_cycles: true
stall_check:
  enabled: false
  warning_time_seconds: 120
  shutdown_time_seconds: 240
library_options:
  mpi_threads_disable: true
  num_nccl_streams: 2
  thread_affinity: 1
  gloo_timeout_seconds: 60
logging:
  level: INFO
  with_timestamp: false
  hide_timestamp: true
unknown:
  key: 1
"""


def with_file(tmp_path: Path, text: str, *words: str) -> argparse.Namespace:
    path = tmp_path / "config.yaml"
    path.write_text(text, "utf-8")
    return parse_args(["-np", "2", "--config-file", str(path), *words])


def test_every_key_of_the_file(tmp_path: Path) -> None:
    args = with_file(tmp_path, FILE)
    expected = {
        "use_gloo": True,
        "use_mpi": False,
        "fusion_threshold_mb": 32,
        "cycle_time_ms": 10.0,
        "cache_capacity": 2048,
        "hierarchical_allreduce": True,
        "hierarchical_allgather": True,
        "torus_allreduce": True,
        "autotune": True,
        "autotune_log_file": "horovod_autotune_log.txt",
        "autotune_warmup_samples": 5,
        "autotune_steps_per_sample": 20,
        "autotune_bayes_opt_max_samples": 50,
        "autotune_gaussian_process_noise": 0.9,
        "timeline_filename": "horovod_timeline.json",
        "timeline_mark_cycles": True,
        "no_stall_check": True,
        "stall_check_warning_time_seconds": 120,
        "stall_check_shutdown_time_seconds": 240,
        "mpi_threads_disable": True,
        "num_nccl_streams": 2,
        "thread_affinity": 1,
        "gloo_timeout_seconds": 60,
        "log_level": "INFO",
        "log_with_timestamp": False,
    }
    assert {name: getattr(args, name) for name in expected} == expected
    keys = {knob.name for knob in KNOBS if knob.yaml and knob.name != "controller"}
    assert keys == set(expected) - {"use_gloo", "use_mpi"}
    assert "HOROVOD_CYCLE_TIME=10.0" in exported(args)
    assert "HOROVOD_LOG_HIDE_TIME=1" in exported(args)
    assert "HOROVOD_STALL_CHECK_DISABLE=1" in exported(args)


def test_unknown_keys_of_the_file_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_file(tmp_path, FILE)
    path = tmp_path / "config.yaml"
    assert capsys.readouterr().err == (
        f"horovodrun: warning: {path}: these keys are unknown and ignored: "
        "logging.hide_timestamp, unknown\n"
    )
    with_file(tmp_path, "params: {cycle_time_ms: 1}\nautotune:\n")
    assert capsys.readouterr().err == ""
    assert with_file(tmp_path, "1: {a: 2}\nparams: {3: 4}\n").from_file == frozenset()
    assert "ignored: 1, params.3\n" in capsys.readouterr().err


def test_flags_win_over_the_file_wherever_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(FILE, "utf-8")
    file = ["--config-file", str(path)]
    flags = ["--cycle-time-ms", "3", "--no-autotune", "--stall-check", "--log-with-timestamp"]
    for words in ([*file, *flags], [*flags, *file]):
        args = parse_args(["-np", "2", *words])
        assert args.cycle_time_ms == 3
        assert args.autotune is False
        assert args.no_stall_check is False
        assert args.log_with_timestamp is True
        assert args.cache_capacity == 2048
        assert "cycle_time_ms" not in args.from_file
        assert "cache_capacity" in args.from_file


def test_a_section_alone_has_a_say(tmp_path: Path) -> None:
    args = with_file(tmp_path, "autotune:\nstall_check: {warning_time_seconds: 5}\n")
    assert args.autotune is False
    assert args.no_stall_check is False
    assert with_file(tmp_path, "").autotune is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("controller: slurm", "gloo or mpi is accepted"),
        ("params: {fusion_threshold_mb: -1}", "fusion_threshold_mb"),
        ("params: {fusion_threshold_mb: many}", "a number is accepted"),
        ("params: {fusion_threshold_mb: 1.5}", "an integer is accepted"),
        ("params: {fusion_threshold_mb: .inf}", "an integer from 0 to 4398046511104 is accepted"),
        ("params: {cycle_time_ms: %s}" % ("9" * 400), "a number from 0 to 60000 is accepted"),
        ("params: {torus_allreduce: 3}", "true or false"),
        ("params: 7", "params must hold keys"),
        ("logging: {level: loud}", "one of trace"),
        ("- a", "must hold sections"),
        ("a: [", "config.yaml"),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ValueError) as caught:
        with_file(tmp_path, text)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        parse_args(["-np", "2", "--config-file", str(tmp_path / "none")])


REFUSED = [
    (["--mpi"], "--mpi"),
    (["--jsrun"], "--jsrun"),
    (["--min-np", "1"], "--min-np"),
    (["--host-discovery-script", "x"], "--host-discovery-script"),
]


@pytest.mark.parametrize(("words", "name"), REFUSED)
def test_what_would_change_the_meaning_is_refused(words: list[str], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: .*not supported"):
        check_supported(parse_args(["-np", "2", *words]), {})


def test_every_refused_row_is_tested() -> None:
    names = {words[0] for words, _ in REFUSED}
    assert {knob.flag for knob in KNOBS if knob.effect is Effect.REFUSED} == names


def test_mpi_by_file_or_variable_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"controller: mpi in .*not supported"):
        check_supported(with_file(tmp_path, "controller: mpi"), {})
    check_supported(with_file(tmp_path, "controller: mpi", "--gloo"), {})
    for name in ("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS"):
        check_supported(parse_args(["-np", "2"]), {name.encode(): b"gloo"})
        with pytest.raises(ValueError, match=f"{name}=mpi: only gloo"):
            check_supported(parse_args(["-np", "2"]), {name.encode(): b"mpi"})


@pytest.mark.parametrize(
    "knob", [k for k in KNOBS if k.effect is Effect.NONE], ids=lambda k: k.name
)
def test_what_has_no_effect_yet_is_said(knob: Knob) -> None:
    if knob.flags:
        values: dict[str, object] = {"int": 7, "pair": [1, 2], "names": {"a"}}
        given = {knob.name: values.get(knob.kind, True)}
        assert config.without_effect(given, [], {}) == [knob.flag]
        if knob.yaml:
            assert config.without_effect(given, [knob.name], {}) == [knob.yaml]
        if knob.kind in ("switch", "flag"):
            assert config.without_effect({knob.name: False}, [], {}) == []
    if knob.env:
        assert config.without_effect(
            {}, [], {knob.env.encode(): b"1x" if knob.kind == "str" else b"7"}
        )
    assert config.without_effect({}, [], {}) == []


def test_check_build() -> None:
    def box(framework: str) -> str:
        return "[X]" if importlib.util.find_spec(framework) else "[ ]"

    lines = check_build().split("\n")
    assert lines[0].startswith("Horovod v")
    assert lines[0].endswith(":")
    assert lines[1:] == [
        "",
        "Available Frameworks:",
        f"    {box('tensorflow')} TensorFlow",
        f"    {box('torch')} PyTorch",
        "    [ ] MXNet",
        "",
        "Available Controllers:",
        "    [ ] MPI",
        "    [X] Gloo",
        "",
        "Available Tensor Operations:",
        "    [ ] NCCL",
        "    [ ] DDL",
        "    [ ] CCL",
        "    [ ] MPI",
        "    [X] Gloo    ",
        "",
    ]
