"""What the documents say is so: commands are those of CI, code runs, links lead somewhere."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import signatures
import tensorflow_signatures
from programs import run_programs

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")])
INSTALL_AND_TEST = "pip install '.[test]' && pip install --no-deps tf-keras==2.21.0 && pytest"
INSTALL_AND_TRAIN = "pip install '.[demo]' && horovodrun -np 2 python examples/pytorch_digits.py"


def blocks(path: Path, language: str) -> list[str]:
    """The fenced code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text("utf-8"), re.M | re.S)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def all_blocks(language: str) -> list[object]:
    return [
        pytest.param(block, id=f"{name_of(path)}-{i}")
        for path in DOCUMENTS
        for i, block in enumerate(blocks(path, language))
    ]


def first_screen() -> str:
    return (ROOT / "README.md").read_text("utf-8").partition("\n---\n")[0]


def test_readme_installs_and_trains_and_tests_with_one_command_each() -> None:
    commands = re.findall(r"^```sh\n(.*?)^```$", first_screen(), re.M | re.S)
    assert [command.strip() for command in commands] == [INSTALL_AND_TRAIN, INSTALL_AND_TEST]


def test_ci_runs_the_commands_of_the_readme() -> None:
    """It takes the text from README.md; `readme PREFIX` there finds exactly these two."""
    script = (ROOT / ".ci" / "run").read_text("utf-8")
    prefixes = re.findall(r'^\w+_command=\$\(readme "([^"]+)"\)$', script, re.M)
    lines = [line.strip() for line in (ROOT / "README.md").read_text("utf-8").splitlines()]
    found = [next(line for line in lines if line.startswith(prefix)) for prefix in prefixes]
    assert found == [INSTALL_AND_TEST, INSTALL_AND_TRAIN]


def test_readme_warns_of_the_abandoned_package() -> None:
    assert "pip install horovod" in first_screen()
    assert "abandoned" in first_screen()


def test_readme_names_exactly_four_lines() -> None:
    numbered = re.findall(r"^\S.*# (\d)$", blocks(ROOT / "README.md", "python")[0], re.M)
    assert numbered == ["1", "2", "3", "4"]


def framework(code: str) -> str:
    """Which framework a block is for: tensorflow if it imports that or Keras, else torch."""
    found = re.search(r"^(?:import|from) (?:horovod\.)?(tensorflow|keras)\b", code, re.M)
    return "tensorflow" if found else "torch"


def python_blocks(path: Path, of: str) -> list[str]:
    return [code for code in blocks(path, "python") if framework(code) == of]


FLAVOURS = {"torch": "torch", "tensorflow": "keras3"}
RUNS = [
    pytest.param(
        path, of, size, id=f"{of}-{size}-{name_of(path)}", marks=pytest.mark.flavour(flavour)
    )
    for of, flavour in FLAVOURS.items()
    for size in (1, 2)
    for path in DOCUMENTS
    if python_blocks(path, of)
]


@pytest.mark.parametrize(("path", "of", "size"), RUNS)
def test_python_blocks_run(
    run_in: Callable[..., list[None]], path: Path, of: str, size: int, tmp_path: Path
) -> None:
    for number, code in enumerate(python_blocks(path, of)):
        (tmp_path / f"block{number:02}.py").write_text(code, "utf-8")
    run_in(size, run_programs, directory=tmp_path)


@pytest.mark.parametrize("code", all_blocks("py"))
def test_blocks_of_other_libraries_run(code: str, tmp_path: Path) -> None:
    """They are marked ``py``: what a page compares with."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "0", "WORLD_SIZE": "1"}
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HOROVOD_")}
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:__main__", "-c", code],
        cwd=tmp_path,
        env={**kept, "OMP_NUM_THREADS": "1", **place},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def reference() -> dict[str, set[str]]:
    """What `docs/api.md` has, by module."""
    listed: dict[str, set[str]] = {}
    module = ""
    pattern = r"^\.\. (currentmodule|auto(?:function|class|data)):: ([\w.]+)$"
    for kind, name in re.findall(pattern, (ROOT / "docs" / "api.md").read_text("utf-8"), re.M):
        if kind == "currentmodule":
            module = name
        elif "." not in name:
            listed.setdefault(module, set()).add(name)
    return listed


NAMES = {
    "horovod.torch": {*signatures.SIGNATURES, *signatures.OTHERS} - {"_check_has_gpu"},
    "horovod.tensorflow": {*tensorflow_signatures.TENSORFLOW},
    "horovod.tensorflow.keras": {*tensorflow_signatures.KERAS},
}
WITH_THE_FIRST = {*tensorflow_signatures.BASICS}  # what all front ends have stands with torch's
BY_THEMSELVES = {"HorovodInternalError", *tensorflow_signatures.CONSTANTS}


@pytest.mark.parametrize("module", NAMES)
def test_the_reference_has_every_public_name(module: str) -> None:
    elsewhere = BY_THEMSELVES | (WITH_THE_FIRST if module != "horovod.torch" else set())
    assert not NAMES[module] - elsewhere - reference()[module]


@pytest.mark.parametrize("script", all_blocks("sh"))
def test_shell_block_is_well_formed_and_names_files_that_exist(script: str) -> None:
    subprocess.run(["bash", "-n", "-c", script], check=True, timeout=10)
    for path in re.findall(
        r"\b(?:examples|benchmarks|tests|core|src)/[\w./-]+\.(?:py|cc)\b", script
    ):
        assert (ROOT / path).is_file(), path


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", path.read_text("utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", prose):
        if not re.match(r"https?:|mailto:", target):
            assert (path.parent / target).exists(), target


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_files_that_are_named_exist(path: Path) -> None:
    """`core/mesh.cc` and the like, so that a renamed file takes its descriptions along."""
    pattern = r"`((?:core|src|tests|examples|benchmarks|docs)/[\w./-]+\.[a-z]+)`"
    for named in re.findall(pattern, path.read_text("utf-8")):
        assert (ROOT / named).is_file(), named


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_nothing_is_left_to_fill_in(path: Path) -> None:
    assert not re.search(r"\b(?:TODO|FIXME|TBD|XXX)\b", path.read_text("utf-8"))
