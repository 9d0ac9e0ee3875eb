"""The README's code runs as printed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_there_is_code_to_run():
    assert len(BLOCKS) >= 3


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_python_blocks_run(block, tmp_path):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("FXAMP_")}
    done = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_variable_named_is_one_that_is_read():
    named = set(re.findall(r"FXAMP_[A-Z_]+", README.read_text())) - {"FXAMP_"}
    source = "".join(path.read_text() for path in (README.parent / "fxamp").rglob("*.py"))
    for variable in named:
        stem = re.sub(r"(ALLOW|INFER|DENY|CLEAR)LIST_(ADD|REMOVE)$", "", variable)
        assert variable in source or stem == "FXAMP_", variable


@pytest.mark.parametrize("page", [README, *sorted((README.parent / "docs").glob("*.md"))], ids=lambda page: page.name)
def test_every_file_named_is_there(page):
    for name in re.findall(r"`((?:fxamp|tools|tests)/[\w/.*]+)`", page.read_text()):
        assert list(README.parent.glob(name)), name
