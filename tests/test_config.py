"""The table of knobs: what a worker reads, what a launcher exports, and the page made from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from horovod.common import config
from horovod.common.config import KNOBS, Effect, Knob

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = [knob for knob in KNOBS if knob.setting]
NUMBERS = [knob for knob in SETTINGS if (knob.env_kind or knob.kind) in ("int", "float")]


def test_names_and_variables_are_unique() -> None:
    for attribute in ("name", "env", "yaml", "setting"):
        values = [getattr(knob, attribute) for knob in KNOBS if getattr(knob, attribute)]
        assert sorted(set(values)) == sorted(values)


def test_flags_are_unique() -> None:
    flags = [flag for knob in KNOBS for flag in knob.flags + knob.off_flags]
    assert len(set(flags)) == len(flags)


def test_rows_and_settings_agree() -> None:
    assert {knob.setting for knob in SETTINGS} == config.setting_names()
    assert all(knob.env for knob in SETTINGS)


def test_refused_rows_say_why() -> None:
    assert all(bool(knob.refusal) == (knob.effect is Effect.REFUSED) for knob in KNOBS)


def test_documentation_is_generated() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text("utf-8") == config.documentation()


@pytest.mark.parametrize(
    ("name", "values", "default", "effect"),
    [
        ("HOROVOD_SIMD", "`auto`, `baseline`, `avx2`, `avx512`", "`auto`", "works"),
        ("HOROVOD_SHM_STORES", "`auto`, `ordinary`, `streaming`", "`auto`", "works"),
        (
            "HOROVOD_LOG_LEVEL",
            "`trace`, `debug`, `info`, `warning`, `error`, `fatal`; any other is the default",
            "`warning`",
            "works",
        ),
        ("HOROVOD_JOIN_ALL_OPS", "`0`, `1`", "`0`", "works"),
        ("HOROVOD_DYNAMIC_PROCESS_SETS", "`0`, `1`; on if not 0", "`0`", "not needed"),
        ("HOROVOD_SIZE", "an integer >= 1", "`1`", "works"),
        (
            "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
            "a number from 0 to 1",
            "`0.8`",
            "no effect yet",
        ),
    ],
)
def test_documentation_says_what_is_accepted(
    name: str, values: str, default: str, effect: str
) -> None:
    (row,) = [line for line in config.documentation().splitlines() if f"| `{name}` |" in line]
    assert row.split(" | ")[3:6] == [values, default, effect]


def test_defaults_are_a_world_of_one() -> None:
    settings = config.from_environ({})
    assert (settings.rank, settings.size, settings.local_rank, settings.local_size) == (0, 1, 0, 1)
    assert (settings.cross_rank, settings.cross_size, settings.hostname) == (0, 1, "localhost")
    assert settings.store is settings.job_key_file is settings.job_id is None
    assert settings.stall_check_enabled
    assert settings.stall_warning_s == 60
    assert settings.stall_shutdown_s == 0
    assert settings.deadlock_s == 60
    assert settings.heartbeat_s == 15
    assert settings.start_timeout_s == 30
    assert settings.simd == "auto"


@pytest.mark.parametrize("knob", SETTINGS, ids=lambda knob: knob.env)
def test_every_variable_is_read(knob: Knob) -> None:
    kind = knob.env_kind or knob.kind
    text = {"int": "3", "float": "3.5", "choice": (knob.choices or ("",))[-1]}.get(kind, "1")
    expected: object = {"int": 3, "float": 3.5, "choice": text, "str": text}.get(kind, True)
    environ = {knob.env: text}
    if knob.setting.endswith("rank"):
        environ[knob.env.replace("RANK", "SIZE")] = "8"
    value = getattr(config.from_environ(environ), knob.setting)
    assert value == ((not expected) if knob.negated else expected)


@pytest.mark.parametrize("knob", NUMBERS, ids=lambda knob: knob.env)
@pytest.mark.parametrize("text", ["x", "1e", "nan", "inf", "-1", "(None,)", "0x10"])
def test_a_number_that_cannot_be_read_is_named(knob: Knob, text: str) -> None:
    with pytest.raises(ValueError) as caught:
        config.from_environ({knob.env: text})
    assert f"{knob.env}={text}" in str(caught.value)
    assert "is accepted" in str(caught.value)


@pytest.mark.parametrize(
    "knob", [knob for knob in NUMBERS if knob.tunable], ids=lambda knob: knob.env
)
@pytest.mark.parametrize("text", ["9" * 20, "9" * 400])
def test_a_number_beyond_all_use_is_named_with_its_range(knob: Knob, text: str) -> None:
    with pytest.raises(ValueError) as caught:
        config.from_environ({knob.env: text})
    assert str(caught.value).startswith(f"{knob.env}={text}: ")
    assert str(caught.value).endswith(f" from {knob.minimum} to {knob.maximum} is accepted")
    config.from_environ({knob.env: str(knob.maximum)})


def test_the_range_of_an_option_is_in_its_own_unit() -> None:
    knob = next(knob for knob in KNOBS if knob.name == "fusion_threshold_mb")
    assert config.check_option(knob, 1 << 42, "it") == 1 << 42
    with pytest.raises(ValueError, match="it: an integer from 0 to 4398046511104 is accepted"):
        config.check_option(knob, (1 << 42) + 1, "it")


@pytest.mark.parametrize("knob", SETTINGS, ids=lambda knob: knob.env)
def test_an_empty_variable_is_as_none(knob: Knob) -> None:
    assert config.from_environ({knob.env: ""}) == config.from_environ({})


@pytest.mark.parametrize(
    ("text", "truth"), [("1", True), ("2", True), ("0", False), ("-1", False), ("true", False)]
)
def test_the_boolean_rule(text: str, truth: bool) -> None:
    environ = {"HOROVOD_DISABLE_GROUP_FUSION": text, "HOROVOD_STALL_CHECK_DISABLE": text}
    settings = config.from_environ(environ)
    assert settings.disable_group_fusion is truth
    assert settings.stall_check_enabled is not truth


@pytest.mark.parametrize(
    ("text", "truth"), [("1", True), ("-1", True), ("0", False), ("yes", False)]
)
def test_the_other_boolean_rule(text: str, truth: bool) -> None:
    settings = config.from_environ({"HOROVOD_DYNAMIC_PROCESS_SETS": text})
    assert settings.dynamic_process_sets is truth


def test_log_levels() -> None:
    assert config.from_environ({"HOROVOD_LOG_LEVEL": "DEBUG"}).log_level == "debug"
    assert config.from_environ({"HOROVOD_LOG_LEVEL": "chatty"}).log_level == "warning"


@pytest.mark.parametrize("name", ["HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS"])
def test_other_controllers_are_refused(name: str) -> None:
    assert config.from_environ({name: "GLOO"}).controller == "gloo"
    with pytest.raises(ValueError, match=f"{name}=mpi: one of gloo is accepted"):
        config.from_environ({name: "mpi"})


def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(ValueError, match="HOROVOD_LOCAL_RANK=2 must be below HOROVOD_LOCAL_SIZE=2"):
        config.from_environ({"HOROVOD_LOCAL_RANK": "2", "HOROVOD_LOCAL_SIZE": "2"})


@pytest.mark.parametrize(
    "name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS"]
)
def test_a_foreign_launcher_is_seen(name: str) -> None:
    text = config.foreign_launcher({name: "4"})
    assert text is not None
    assert f"{name}=4" in text
    assert "horovodrun -np 4" in text
    assert config.foreign_launcher({name: "1"}) is None
    assert config.foreign_launcher({name: "many"}) is None
    assert config.foreign_launcher({name: "4", "HOROVOD_STORE": "unix:/x"}) is None
    assert config.foreign_launcher({name: "4", "HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"}) is None
    assert config.foreign_launcher({name: "4", "HOROVOD_RANK": "0"}) is not None


def test_flags_win_over_environment_over_file() -> None:
    environ = {b"HOROVOD_FUSION_THRESHOLD": b"7", b"HOROVOD_CYCLE_TIME": b"7"}
    given = {"fusion_threshold_mb": 2, "cycle_time_ms": 20.0, "cache_capacity": 5}
    exported = config.exports(given, ["cycle_time_ms", "cache_capacity"], environ)
    assert exported == {
        b"HOROVOD_FUSION_THRESHOLD": b"2097152",
        b"HOROVOD_CACHE_CAPACITY": b"5",
    }
    shown = {
        name: (text, source)
        for name, text, source in config.effective(
            given, ["cycle_time_ms", "cache_capacity"], environ
        )
    }
    assert shown["HOROVOD_FUSION_THRESHOLD"] == ("2097152", "flag --fusion-threshold-mb")
    assert shown["HOROVOD_CYCLE_TIME"] == ("7", "environment")
    assert shown["HOROVOD_CACHE_CAPACITY"] == ("5", "file: params.cache_capacity")
    assert shown["HOROVOD_STALL_CHECK_TIME_SECONDS"] == ("60.0", "default")


def test_nothing_is_exported_that_was_not_given() -> None:
    assert config.exports({knob.name: None for knob in KNOBS}, [], {}) == {}
