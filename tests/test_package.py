"""What `pip install` promises: a light import, clear refusals, types, and metadata that is true."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import re
import subprocess
import sys
from pathlib import Path

import pytest

import horovod

ROOT = Path(__file__).resolve().parent.parent


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False
    )


def refusal(code: str) -> str:
    """The last line of the traceback that `code` ends with."""
    done = run(code)
    assert done.returncode == 1, done
    return done.stderr.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def metadata() -> importlib.metadata.PackageMetadata:
    try:
        return importlib.metadata.metadata("horovod")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("horovod runs from its source tree here, without metadata")


def test_import_takes_less_than_100_ms() -> None:
    timed = "import time; t = time.perf_counter(); import horovod; print(time.perf_counter() - t)"
    assert min(float(run(timed).stdout) for _ in range(5)) < 0.1


def test_import_loads_neither_engine_nor_framework() -> None:
    heavy = {"horovod._core", "horovod.runner", "torch", "numpy", "tensorflow", "jax"}
    done = run(f"import sys, horovod; print(sorted({heavy!r} & set(sys.modules)))")
    assert done.stdout.strip() == "[]"


def test_launcher_loads_neither_engine_nor_framework() -> None:
    heavy = {"horovod._core", "torch", "numpy", "tensorflow", "jax"}
    done = run(f"import sys, horovod.runner.launch; print(sorted({heavy!r} & set(sys.modules)))")
    assert done.stdout.strip() == "[]", done.stderr


def test_run_is_the_launcher_function() -> None:
    from horovod.runner import run as launcher

    assert horovod.run is launcher
    with pytest.raises(AttributeError, match="no attribute 'rnu'"):
        _ = horovod.rnu


def test_torch_adapter_without_torch_says_what_to_install() -> None:
    message = refusal("import sys; sys.modules['torch'] = None; import horovod.torch")
    assert message.startswith("ImportError:")
    assert "horovod.torch" in message
    assert "pip install torch" in message


def test_mxnet_adapter_says_that_there_is_none() -> None:
    message = refusal("import horovod.mxnet")
    assert message.startswith("ImportError: horovod.mxnet does not exist")


def test_package_is_typed() -> None:
    assert importlib.resources.files("horovod").joinpath("py.typed").is_file()
    assert importlib.resources.files("horovod").joinpath("_core.pyi").is_file()


def test_stub_is_what_the_module_says(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nanobind.stubgen", "-q", "-m", "horovod._core", "-o"]
    fresh = tmp_path / "_core.pyi"
    subprocess.run([*command, str(fresh)], check=True, timeout=30)
    kept = (ROOT / "src" / "horovod" / "_core.pyi").read_text("utf-8")
    assert kept == fresh.read_text("utf-8"), (
        "write it anew: python -m nanobind.stubgen -m horovod._core -o src/horovod/_core.pyi"
    )


def test_version_is_the_distribution_s(metadata: importlib.metadata.PackageMetadata) -> None:
    assert metadata["Version"] == horovod.__version__


def test_changelog_knows_the_version() -> None:
    release = horovod.__version__.partition(".dev")[0]
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert re.search(rf"^## \[(Unreleased|{re.escape(release)})\]", text, re.MULTILINE)


def test_metadata(metadata: importlib.metadata.PackageMetadata) -> None:
    assert metadata["Name"] == "horovod"
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License-Expression"] == "Apache-2.0"
    extras = {"torch", "tensorflow", "keras", "tf-keras", "demo", "benchmarks"}
    assert set(metadata.get_all("Provides-Extra") or []) == {*extras, "test", "docs", "dev"}
    required = [r for r in metadata.get_all("Requires-Dist") or [] if "extra ==" not in r]
    names = {re.split(r"[^\w-]", r)[0].lower() for r in required}
    assert names == {"cloudpickle", "pyyaml"}, "no framework, no compiler at run time"


def test_commands_are_installed(metadata: importlib.metadata.PackageMetadata) -> None:
    scripts = importlib.metadata.distribution("horovod").entry_points
    assert {s.name: s.value for s in scripts} == {
        "horovod": "horovod.__main__:main",
        "horovodrun": "horovod.runner.launch:run_commandline",
    }


@pytest.mark.parametrize(
    ("framework", "modules"),
    [
        ("torch", "mpi_ops functions optimizer compression sync_batch_norm"),
        (
            "tensorflow",
            "mpi_ops functions compression util gradient_aggregation gradient_aggregation_eager "
            "sync_batch_norm keras",
        ),
    ],
)
def test_modules_are_attributes_of_their_front_end(framework: str, modules: str) -> None:
    """After `import horovod.torch as hvd` alone, as scripts have it."""
    program = f"import horovod.{framework} as hvd; [getattr(hvd, m) for m in {modules.split()}]"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=55)
