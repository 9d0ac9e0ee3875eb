"""tools/environment.sh: what pip is asked for, on a terminal and elsewhere."""

import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fxamp.lists.environment import KNOWN

TOOLS = Path(__file__).parent.parent / "tools"
PIP = '#!/usr/bin/env bash\necho "$@" > asked\n'


@pytest.fixture
def checkout(tmp_path):
    """A checkout whose Python only notes what it was asked."""
    (tmp_path / "tools").mkdir()
    shutil.copy(TOOLS / "environment.sh", tmp_path / "tools")
    for name in ("setup.cfg", "constraints.txt"):
        (tmp_path / name).write_text("")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PIP)
    python.chmod(0o755)
    return tmp_path


def source(checkout: Path, on_terminal: bool, **variables: str) -> str:
    """What pip was asked when the script was sourced."""
    output, terminal = pty.openpty() if on_terminal else (None, subprocess.DEVNULL)
    command = ["bash", "-c", "source tools/environment.sh test"]
    environment = {**os.environ, **variables}
    done = subprocess.run(command, cwd=checkout, env=environment, stdout=terminal, stderr=subprocess.PIPE, text=True)
    if output is not None:
        os.close(output)
        os.close(terminal)
    assert done.returncode == 0, done.stderr
    asked = checkout / "asked"
    return asked.read_text() if asked.exists() else ""


@pytest.mark.skipif(sys.platform == "win32", reason="bash and terminals")
@pytest.mark.parametrize(
    ("on_terminal", "progress", "is_quiet"), [(True, "on", False), (True, "off", True), (False, "on", True)]
)
def test_progress_is_shown_on_a_terminal_only(checkout, on_terminal, progress, is_quiet):
    asked = source(checkout, on_terminal, PIP_PROGRESS=progress)
    assert ("--quiet" in asked, "--progress-bar off" in asked) == (is_quiet, is_quiet)
    assert ("--progress-bar on" in asked) == (not is_quiet)
    assert "-c constraints.txt -e .[test]" in asked


def test_what_is_installed_is_not_installed_again(checkout):
    assert source(checkout, False)
    (checkout / "asked").unlink()
    assert source(checkout, False) == ""
    (checkout / "constraints.txt").write_text("torch==2.13.0\n")
    assert source(checkout, False)


def test_the_tools_read_no_variable_that_fxamp_would_warn_about():
    scripts = "".join(path.read_text() for path in TOOLS.iterdir() if path.is_file())
    assert [name for name in re.findall(r"FXAMP_[A-Z_]+", scripts) if name not in KNOWN] == []
