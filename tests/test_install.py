"""What an editable install, as the README says to make it, lets Python import."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "nanovllm")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with a clone installed from the folder ``nanovllm``. Other packages are those
    of this interpreter."""
    root = tmp_path_factory.mktemp("install")
    clone = root / "nanovllm"
    clone.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, clone / name)
    run(Path(sys.executable), "-m", "venv", "--without-pip", str(root / "env"))
    python = root / "env" / "bin" / "python"
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    # A line with a folder adds that folder, but no editable installs that it has.
    Path(site, "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(python, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "-e", str(clone))
    return python


def run(*command: object, cwd: Path | None = None) -> str:
    """The output of a command that has to succeed."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_script_beside_a_clone_named_nanovllm_imports_the_package(python):
    """Guards "cannot import name 'LLM' from 'nanovllm' (unknown location)": the script's folder is
    searched first, and there the clone looks like a package without an ``__init__.py``."""
    parent = python.parents[2]
    script = parent / "script.py"
    script.write_text("import nanovllm\nfrom nanovllm import LLM\nprint(nanovllm.__file__)\n")
    expected = str(parent / "nanovllm" / "nanovllm" / "__init__.py")
    assert run(python, script).strip() == expected
    assert run(python, script, cwd=parent / "env").strip() == expected
    assert run(python, "-c", script.read_text(), cwd=parent).strip() == expected
