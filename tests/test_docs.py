"""What the documents say is so: commands are those of CI, code runs, links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")])
INSTALL_AND_TEST = "pip install '.[test]' && pytest"
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


@pytest.mark.parametrize("code", all_blocks("python"))
def test_python_block_runs_in_a_world_of_one(code: str, tmp_path: Path) -> None:
    launcher = ("HOROVOD_", "OMPI_", "PMI_", "SLURM_", "WORLD_SIZE")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(launcher)}
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning", "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("script", all_blocks("sh"))
def test_shell_block_is_well_formed_and_names_files_that_exist(script: str) -> None:
    subprocess.run(["bash", "-n", "-c", script], check=True, timeout=10)
    for path in re.findall(
        r"\b(?:examples|benchmarks|tests|core|src)/[\w./-]+\.(?:py|cc)\b", script
    ):
        assert (ROOT / path).is_file(), path


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text("utf-8")):
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
