"""The table of every option, variable and YAML key, one row each; knows only the row's shape."""

from __future__ import annotations

import enum
from dataclasses import dataclass

MIB = 1 << 20

# Beyond any use, and what the engine and the system calls can still hold in the units they take.
_MOST_BYTES = 1 << 62
_MOST_TENSORS = 1 << 31
_LONGEST_S = 10**9
_LONGEST_POLL_S = 10**6
_LONGEST_CYCLE_MS = 60_000  # more would look like a job that hangs


class Effect(enum.Enum):
    """What comes of a knob in this version."""

    WORKS = "works"
    NONE = "no effect yet"
    NEEDLESS = "not needed"
    REFUSED = "refused"
    IGNORED = "ignored"


@dataclass(frozen=True)
class Knob:
    """One row.

    Attributes:
        name: attribute of the parsed command line; unique.
        help: one sentence for ``--help`` and the documentation.
        group: heading in ``--help`` and the documentation.
        flags: option strings; ``off_flags`` set the opposite and are not shown in ``--help``.
        kind: ``int``, ``float``, ``str``, ``choice``, ``flag`` (False unless given), ``switch``
            (on, off or not given), ``names`` (a set), ``pair`` (two ints).
        env: variable; ``env_kind`` if its text is read in another way (``nonzero``: on if it is any
            integer but 0); ``env_scale`` times an integer option is the variable's unit.
        yaml: key in the configuration file, section and name.
        default: in the variable's unit.
        setting: field of ``Settings`` that the variable fills.
        negated: the setting and the YAML key say the opposite of the variable and the attribute.
        inverse: a switch whose variable says the opposite of the parsed attribute.
        needs: name of the knob without which this one is not exported.
        exported: whether an option that was given reaches the workers as a variable.
        tunable: whether a user is meant to set the variable.
        lenient: an unknown choice is the default instead of an error.
        on: what ``flags`` store for a switch (False where the flag says "no").
        exclusive: options with the same word here can't be given together.
        refusal: for ``Effect.REFUSED``, why, and what to do instead.
    """

    name: str
    help: str
    group: str
    flags: tuple[str, ...] = ()
    off_flags: tuple[str, ...] = ()
    kind: str = "str"
    env: str = ""
    env_kind: str | None = None
    env_scale: int = 1
    yaml: str = ""
    default: str | int | float | bool | None = None
    setting: str = ""
    effect: Effect = Effect.WORKS
    minimum: int | float | None = None
    maximum: int | float | None = None
    choices: tuple[str, ...] = ()
    metavar: str | None = None
    negated: bool = False
    inverse: bool = False
    needs: str = ""
    exported: bool = True
    tunable: bool = True
    lenient: bool = False
    on: bool = True
    exclusive: str = ""
    refusal: str = ""

    @property
    def flag(self) -> str:
        """The option by which messages name it: the first long one."""
        return next(flag for flag in self.flags if flag.startswith("--"))


_NOT_ELASTIC = "elastic jobs are not supported yet; give only -np for a job of fixed size"
_NOT_MPI = "MPI is not supported; leave the option out and horovod starts the processes itself"

_JOB = "Job"
_HOSTS = "Hosts"
_TUNING = "Tuning"
_AUTOTUNE = "Autotune"
_ELASTIC = "Elastic"
_TIMELINE = "Timeline"
_STALL = "Stalls and lost peers"
_LIBRARY = "Libraries"
_LOGGING = "Logging"
_CONTROLLER = "Controller"
_PLACEMENT = "Set by the launcher for its workers"
_ENVIRONMENT = "Variables without a flag"
_BUILD = "Build-time variables of the original, ignored"

KNOBS: tuple[Knob, ...] = (
    # What to start.
    Knob("num_proc", "Number of processes to start.", _JOB, ("-np", "--num-proc"), kind="int"),
    Knob(
        "check_build",
        "Show which frameworks, controllers and tensor operations are available, and exit.",
        _JOB,
        ("-cb", "--check-build"),
        kind="flag",
    ),
    Knob(
        "disable_cache",
        "Repeat start-up checks whose results would be remembered for an hour.",
        _JOB,
        ("--disable-cache",),
        kind="flag",
        effect=Effect.NONE,
    ),
    Knob(
        "start_timeout",
        "Seconds until all processes must have found each other.",
        _JOB,
        ("--start-timeout",),
        kind="int",
        env="HOROVOD_START_TIMEOUT",
        env_kind="float",
        default=30.0,
        setting="start_timeout_s",
        minimum=0,
        maximum=_LONGEST_POLL_S,
        metavar="SECONDS",
    ),
    Knob(
        "output_filename",
        "Also write the output of each rank to DIR/rank.<rank>/stdout and stderr.",
        _JOB,
        ("--output-filename",),
        metavar="DIR",
    ),
    Knob("verbose", "Say what is done and which settings hold.", _JOB, ("--verbose",), kind="flag"),
    Knob(
        "config_file",
        "YAML file with settings.",
        _JOB,
        ("--config-file",),
        metavar="FILE",
    ),
    # Where to start it.
    Knob(
        "hosts",
        "Hosts and their slots, host1:2,host2:4; without slots, one.",
        _HOSTS,
        ("-H", "--hosts"),
        exclusive="hosts",
    ),
    Knob(
        "hostfile",
        "File with one host a line: name slots=N.",
        _HOSTS,
        ("-hostfile", "--hostfile"),
        exclusive="hosts",
        metavar="FILE",
    ),
    Knob(
        "nics",
        "Network interfaces to use, comma-separated.",
        _HOSTS,
        ("--network-interfaces", "--network-interface"),
        kind="names",
        effect=Effect.NONE,
        metavar="A,B",
    ),
    Knob(
        "ssh_port",
        "Port of sshd on remote hosts.",
        _HOSTS,
        ("-p", "--ssh-port"),
        kind="int",
        effect=Effect.NONE,
    ),
    Knob(
        "ssh_identity_file",
        "Private key for ssh.",
        _HOSTS,
        ("-i", "--ssh-identity-file"),
        effect=Effect.NONE,
        metavar="FILE",
    ),
    # How collectives run.
    Knob(
        "fusion_threshold_mb",
        "Most MiB of tensors in one fused operation, 32 at most; the variable is in bytes.",
        _TUNING,
        ("--fusion-threshold-mb",),
        kind="int",
        env="HOROVOD_FUSION_THRESHOLD",
        env_scale=MIB,
        yaml="params.fusion_threshold_mb",
        default=32 * MIB,
        setting="fusion_threshold_bytes",
        minimum=0,
        maximum=_MOST_BYTES,
    ),
    Knob(
        "cycle_time_ms",
        "Milliseconds to wait on purpose for more tensors to fuse; 0 never waits.",
        _TUNING,
        ("--cycle-time-ms",),
        kind="float",
        env="HOROVOD_CYCLE_TIME",
        yaml="params.cycle_time_ms",
        default=0.0,
        setting="cycle_time_ms",
        minimum=0,
        maximum=_LONGEST_CYCLE_MS,
    ),
    Knob(
        "cache_capacity",
        "Number of tensors whose description is remembered by all ranks.",
        _TUNING,
        ("--cache-capacity",),
        kind="int",
        env="HOROVOD_CACHE_CAPACITY",
        yaml="params.cache_capacity",
        default=65536,
        setting="cache_capacity",
        minimum=0,
        maximum=_MOST_TENSORS,
    ),
    Knob(
        "hierarchical_allreduce",
        "Reduce within hosts first.",
        _TUNING,
        ("--hierarchical-allreduce",),
        ("--no-hierarchical-allreduce",),
        kind="switch",
        env="HOROVOD_HIERARCHICAL_ALLREDUCE",
        yaml="params.hierarchical_allreduce",
        default=False,
        effect=Effect.NONE,
    ),
    Knob(
        "hierarchical_allgather",
        "Gather within hosts first.",
        _TUNING,
        ("--hierarchical-allgather",),
        ("--no-hierarchical-allgather",),
        kind="switch",
        env="HOROVOD_HIERARCHICAL_ALLGATHER",
        yaml="params.hierarchical_allgather",
        default=False,
        effect=Effect.NONE,
    ),
    Knob(
        "torus_allreduce",
        "Reduce along the two axes of a grid of hosts and local ranks.",
        _TUNING,
        ("--torus-allreduce",),
        ("--no-torus-allreduce",),
        kind="switch",
        env="HOROVOD_TORUS_ALLREDUCE",
        yaml="params.torus_allreduce",
        default=False,
        effect=Effect.NONE,
    ),
    Knob(
        "autotune",
        "Search for the best tuning values while training.",
        _AUTOTUNE,
        ("--autotune",),
        ("--no-autotune",),
        kind="switch",
        env="HOROVOD_AUTOTUNE",
        yaml="autotune.enabled",
        default=False,
        effect=Effect.NONE,
    ),
    Knob(
        "autotune_log_file",
        "CSV file for what the search tried.",
        _AUTOTUNE,
        ("--autotune-log-file",),
        env="HOROVOD_AUTOTUNE_LOG",
        yaml="autotune.log_file",
        effect=Effect.NONE,
        needs="autotune",
        metavar="FILE",
    ),
    Knob(
        "autotune_warmup_samples",
        "Samples to drop at the start.",
        _AUTOTUNE,
        ("--autotune-warmup-samples",),
        kind="int",
        env="HOROVOD_AUTOTUNE_WARMUP_SAMPLES",
        yaml="autotune.warmup_samples",
        default=3,
        effect=Effect.NONE,
        minimum=0,
        needs="autotune",
    ),
    Knob(
        "autotune_steps_per_sample",
        "Steps in one sample.",
        _AUTOTUNE,
        ("--autotune-steps-per-sample",),
        kind="int",
        env="HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE",
        yaml="autotune.steps_per_sample",
        default=10,
        effect=Effect.NONE,
        minimum=0,
        needs="autotune",
    ),
    Knob(
        "autotune_bayes_opt_max_samples",
        "Samples to take at most.",
        _AUTOTUNE,
        ("--autotune-bayes-opt-max-samples",),
        kind="int",
        env="HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
        yaml="autotune.bayes_opt_max_samples",
        default=20,
        effect=Effect.NONE,
        minimum=0,
        needs="autotune",
    ),
    Knob(
        "autotune_gaussian_process_noise",
        "Assumed noise of a sample, from 0 to 1.",
        _AUTOTUNE,
        ("--autotune-gaussian-process-noise",),
        kind="float",
        env="HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
        yaml="autotune.gaussian_process_noise",
        default=0.8,
        effect=Effect.NONE,
        minimum=0,
        maximum=1,
        needs="autotune",
    ),
    # Elastic jobs.
    Knob(
        "min_num_proc",
        "Fewest processes an elastic job goes on with; makes the job elastic.",
        _ELASTIC,
        ("--min-np", "--min-num-proc"),
        kind="int",
        effect=Effect.REFUSED,
        refusal=_NOT_ELASTIC,
    ),
    Knob(
        "max_num_proc",
        "Most processes of an elastic job.",
        _ELASTIC,
        ("--max-np", "--max-num-proc"),
        kind="int",
        effect=Effect.NONE,
    ),
    Knob(
        "slots",
        "Slots of a discovered host that names none.",
        _ELASTIC,
        ("--slots-per-host",),
        kind="int",
        effect=Effect.NONE,
    ),
    Knob(
        "elastic_timeout",
        "Seconds to wait for enough slots.",
        _ELASTIC,
        ("--elastic-timeout",),
        kind="int",
        env="HOROVOD_ELASTIC_TIMEOUT",
        default=600,
        effect=Effect.NONE,
        exported=False,
    ),
    Knob(
        "reset_limit",
        "Resets after which an elastic job stops.",
        _ELASTIC,
        ("--reset-limit",),
        kind="int",
        effect=Effect.NONE,
    ),
    Knob(
        "cooldown_range",
        "Seconds, from and to, that a failed host is left alone.",
        _ELASTIC,
        ("--blacklist-cooldown-range",),
        kind="pair",
        effect=Effect.NONE,
    ),
    Knob(
        "host_discovery_script",
        "Command that prints the hosts of an elastic job; makes the job elastic.",
        _ELASTIC,
        ("--host-discovery-script",),
        effect=Effect.REFUSED,
        refusal=_NOT_ELASTIC,
        exclusive="hosts",
        metavar="COMMAND",
    ),
    # What can be seen of a run.
    Knob(
        "timeline_filename",
        "File for the timeline.",
        _TIMELINE,
        ("--timeline-filename",),
        env="HOROVOD_TIMELINE",
        yaml="timeline.filename",
        setting="timeline",
        effect=Effect.NONE,
        metavar="FILE",
    ),
    Knob(
        "timeline_mark_cycles",
        "Mark the runtime's cycles in the timeline.",
        _TIMELINE,
        ("--timeline-mark-cycles",),
        ("--no-timeline-mark-cycles",),
        kind="switch",
        env="HOROVOD_TIMELINE_MARK_CYCLES",
        yaml="timeline.mark_cycles",
        default=False,
        setting="timeline_mark_cycles",
        effect=Effect.NONE,
        needs="timeline_filename",
    ),
    Knob(
        "no_stall_check",
        "Never warn of ranks that keep the others waiting; the YAML key says the opposite.",
        _STALL,
        ("--no-stall-check",),
        ("--stall-check",),
        kind="switch",
        env="HOROVOD_STALL_CHECK_DISABLE",
        yaml="stall_check.enabled",
        default=False,
        setting="stall_check_enabled",
        negated=True,
    ),
    Knob(
        "stall_check_warning_time_seconds",
        "Seconds until a stall is warned of.",
        _STALL,
        ("--stall-check-warning-time-seconds",),
        kind="int",
        env="HOROVOD_STALL_CHECK_TIME_SECONDS",
        env_kind="float",
        yaml="stall_check.warning_time_seconds",
        default=60.0,
        setting="stall_warning_s",
        minimum=0,
        maximum=_LONGEST_S,
    ),
    Knob(
        "stall_check_shutdown_time_seconds",
        "Seconds until a stall ends the job; 0 never ends it.",
        _STALL,
        ("--stall-check-shutdown-time-seconds",),
        kind="int",
        env="HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        env_kind="float",
        yaml="stall_check.shutdown_time_seconds",
        default=0.0,
        setting="stall_shutdown_s",
        minimum=0,
        maximum=_LONGEST_S,
    ),
    Knob(
        "deadlock_timeout",
        "Seconds until a job whose ranks all wait for each other ends; 0 never ends it.",
        _STALL,
        kind="float",
        env="HOROVOD_DEADLOCK_TIMEOUT_SECONDS",
        default=60.0,
        setting="deadlock_s",
        minimum=0,
        maximum=_LONGEST_S,
    ),
    Knob(
        "heartbeat_timeout",
        "Seconds without a sign of life until a peer counts as lost; 0 never.",
        _STALL,
        kind="float",
        env="HOROVOD_HEARTBEAT_TIMEOUT_SECONDS",
        default=15.0,
        setting="heartbeat_s",
        minimum=0,
        maximum=_LONGEST_S,
    ),
    Knob(
        "mpi_threads_disable",
        "Ask MPI for its single-threaded mode.",
        _LIBRARY,
        ("--mpi-threads-disable",),
        ("--no-mpi-threads-disable",),
        kind="switch",
        env="HOROVOD_MPI_THREADS_DISABLE",
        yaml="library_options.mpi_threads_disable",
        default=False,
        effect=Effect.NONE,
    ),
    Knob(
        "mpi_args",
        "Further arguments for mpirun.",
        _LIBRARY,
        ("--mpi-args",),
        effect=Effect.NONE,
    ),
    Knob(
        "tcp_flag",
        "Let Spectrum MPI use TCP.",
        _LIBRARY,
        ("--tcp",),
        kind="flag",
        effect=Effect.NONE,
    ),
    Knob(
        "binding_args",
        "Arguments for mpirun that bind processes.",
        _LIBRARY,
        ("--binding-args",),
        effect=Effect.NONE,
    ),
    Knob(
        "num_nccl_streams",
        "Number of NCCL streams.",
        _LIBRARY,
        ("--num-nccl-streams",),
        kind="int",
        env="HOROVOD_NUM_NCCL_STREAMS",
        yaml="library_options.num_nccl_streams",
        default=1,
        effect=Effect.NONE,
        minimum=0,
    ),
    Knob(
        "thread_affinity",
        "Core for the background thread; the variable lists one core for each local rank.",
        _LIBRARY,
        ("--thread-affinity",),
        kind="int",
        env="HOROVOD_THREAD_AFFINITY",
        env_kind="str",
        yaml="library_options.thread_affinity",
        effect=Effect.NONE,
        minimum=0,
    ),
    Knob(
        "gloo_timeout_seconds",
        "Seconds until two ranks must be connected; --start-timeout covers that here.",
        _LIBRARY,
        ("--gloo-timeout-seconds",),
        kind="int",
        env="HOROVOD_GLOO_TIMEOUT_SECONDS",
        env_kind="float",
        yaml="library_options.gloo_timeout_seconds",
        default=30.0,
        effect=Effect.NONE,
        minimum=0,
    ),
    # What is written.
    Knob(
        "log_level",
        "Least severe messages to write.",
        _LOGGING,
        ("--log-level",),
        kind="choice",
        env="HOROVOD_LOG_LEVEL",
        yaml="logging.level",
        default="warning",
        setting="log_level",
        choices=("trace", "debug", "info", "warning", "error", "fatal"),
        lenient=True,
    ),
    Knob(
        "log_with_timestamp",
        "Leave the time out of messages; the YAML key logging.with_timestamp says the opposite.",
        _LOGGING,
        ("--log-without-timestamp", "--log-hide-timestamp"),
        ("--log-with-timestamp", "--no-log-hide-timestamp"),
        kind="switch",
        env="HOROVOD_LOG_HIDE_TIME",
        yaml="logging.with_timestamp",
        default=False,
        setting="log_hide_time",
        inverse=True,
        on=False,
        exclusive="time",
    ),
    Knob(
        "prefix_output_with_timestamp",
        "Begin each forwarded line with the time.",
        _LOGGING,
        ("-prefix-timestamp", "--prefix-output-with-timestamp"),
        kind="flag",
        exclusive="time",
    ),
    # Who starts and connects the processes.
    Knob(
        "use_gloo",
        "Use horovod's own controller, the default.",
        _CONTROLLER,
        ("--gloo",),
        kind="flag",
        exclusive="launcher",
    ),
    Knob(
        "use_mpi",
        "Start through mpirun.",
        _CONTROLLER,
        ("--mpi",),
        kind="flag",
        effect=Effect.REFUSED,
        refusal=_NOT_MPI,
        exclusive="launcher",
    ),
    Knob(
        "use_jsrun",
        "Start through jsrun.",
        _CONTROLLER,
        ("--jsrun",),
        kind="flag",
        effect=Effect.REFUSED,
        refusal=_NOT_MPI,
        exclusive="launcher",
    ),
    Knob(
        "controller",
        "Control plane; only horovod's own, called gloo for compatibility.",
        _CONTROLLER,
        kind="choice",
        env="HOROVOD_CONTROLLER",
        yaml="controller",
        default="gloo",
        setting="controller",
        choices=("gloo",),
    ),
    Knob(
        "cpu_operations",
        "Data plane for CPU tensors; only horovod's own, called gloo for compatibility.",
        _CONTROLLER,
        kind="choice",
        env="HOROVOD_CPU_OPERATIONS",
        default="gloo",
        setting="cpu_operations",
        choices=("gloo",),
    ),
    *(
        Knob(
            f"placement_{name}",
            text,
            _PLACEMENT,
            kind="int" if isinstance(default, int) else "str",
            env=f"HOROVOD_{name.upper()}",
            default=default,
            setting=name,
            minimum=minimum,
            tunable=False,
        )
        for name, text, default, minimum in (
            ("rank", "Rank of this process.", 0, 0),
            ("size", "Number of processes.", 1, 1),
            ("local_rank", "Rank within the host.", 0, 0),
            ("local_size", "Number of processes on the host.", 1, 1),
            ("cross_rank", "Rank among the processes with the same local rank.", 0, 0),
            ("cross_size", "Number of processes with the same local rank.", 1, 1),
            ("hostname", "Name under which the launcher knows the host.", "localhost", None),
            ("store", "Address of the job's store.", None, None),
            ("job_key_file", "File with the job's key, readable by its owner only.", None, None),
            ("job_id", "Marks the processes of the job; not secret.", None, None),
        )
    ),
    *(
        Knob(
            env.removeprefix("HOROVOD_").lower(),
            text,
            _ENVIRONMENT,
            kind=kind,
            env=env,
            default=default,
            setting=setting,
            effect={
                "": Effect.NONE,
                "elastic": Effect.NONE,
                "dynamic_process_sets": Effect.NEEDLESS,
            }.get(setting, Effect.WORKS),
            choices={
                "simd": ("auto", "baseline", "avx2", "avx512"),
                "shm_stores": ("auto", "ordinary", "streaming"),
            }.get(setting, ()),
        )
        for env, kind, default, setting, text in (
            ("HOROVOD_SIMD", "choice", "auto", "simd", "Vector instructions of the kernels."),
            (
                "HOROVOD_SHM_STORES",
                "choice",
                "auto",
                "shm_stores",
                "Stores into shared memory: through the caches, past them, or what proves faster.",
            ),
            (
                "HOROVOD_JOIN_ALL_OPS",
                "switch",
                False,
                "join_all_ops",
                "Every collective, not only allreduce, goes on after some ranks joined.",
            ),
            (
                "HOROVOD_DISABLE_GROUP_FUSION",
                "switch",
                False,
                "disable_group_fusion",
                "Keep grouped operations apart from all others.",
            ),
            (
                "HOROVOD_DYNAMIC_PROCESS_SETS",
                "nonzero",
                False,
                "dynamic_process_sets",
                "Accepted, not needed: process sets can always be added and removed after init.",
            ),
            (
                "HOROVOD_ELASTIC",
                "nonzero",
                False,
                "elastic",
                "The job is elastic.",
            ),
            ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "str", None, "", "Address of the original's store."),
            ("HOROVOD_GLOO_RENDEZVOUS_PORT", "int", None, "", "Port of the original's store."),
            ("HOROVOD_GLOO_IFACE", "str", None, "", "Network interface to bind."),
            (
                "HOROVOD_ENABLE_ASYNC_COMPLETION",
                "switch",
                False,
                "",
                "GPU work ends on its own.",
            ),
            ("HOROVOD_BATCH_D2D_MEMCOPIES", "switch", None, "", "Batch the copies on a GPU."),
            ("HOROVOD_ADASUM_MPI_CHUNK_SIZE", "int", None, "", "Bytes of one MPI send in Adasum."),
            ("HOROVOD_ENABLE_XLA_OPS", "switch", False, "", "Register TensorFlow XLA operations."),
            ("HOROVOD_CCL_CACHE", "nonzero", False, "", "Caching of oneCCL."),
            (
                "HOROVOD_DISABLE_NVTX_RANGES",
                "nonzero",
                False,
                "",
                "No ranges for the profiler.",
            ),
            ("HOROVOD_SPARK_START_TIMEOUT", "int", 600, "", "Seconds until Spark tasks must run."),
            ("HOROVOD_SPARK_PYTHONPATH", "str", None, "", "PYTHONPATH of Spark workers."),
            ("HOROVOD_SPARK_WORK_DIR", "str", None, "", "Working directory of Spark workers."),
            (
                "HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX",
                "switch",
                False,
                "",
                "Spark workers choose their GPU by local rank.",
            ),
        )
    ),
    *(
        Knob(env.lower(), "", _BUILD, env=env, effect=Effect.IGNORED, tunable=False)
        for env in (
            *(
                f"HOROVOD_{verb}_{part}"
                for verb in ("WITH", "WITHOUT")
                for part in ("TENSORFLOW", "PYTORCH", "MXNET", "MPI", "GLOO", "NVTX")
            ),
            "HOROVOD_GPU",
            *(
                f"HOROVOD_GPU_{op}"
                for op in (
                    "OPERATIONS",
                    "ALLREDUCE",
                    "ALLGATHER",
                    "BROADCAST",
                    "ALLTOALL",
                    "REDUCESCATTER",
                )
            ),
            "HOROVOD_ALLOW_MIXED_GPU_IMPL",
            "HOROVOD_CUDA_HOME",
            "HOROVOD_ROCM_HOME",
            *(f"HOROVOD_NCCL_{part}" for part in ("HOME", "INCLUDE", "LIB", "LINK")),
            "HOROVOD_NVTX_INCLUDE",
            "HOROVOD_BUILD_ARCH_FLAGS",
            "HOROVOD_BUILD_CUDA_CC_LIST",
            "HOROVOD_CMAKE",
            "HOROVOD_DEBUG",
            "HOROVOD_SKIP_COMPILE",
            "HOROVOD_LOCAL_VERSION",
        )
    ),
)
