"""Files are whole or not there: a disk that is full, Control-C and a killed process in the middle of every writer."""

import importlib.util
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from review_cases import FP16, Two

import fxamp
from fxamp import whole
from fxamp.errors import OptionError
from fxamp.numerics.histogram import Histogram
from fxamp.numerics.ranges import NodeRange, Ranges
from fxamp.review.dump import dump

X = torch.linspace(-1, 1, 32).reshape(4, 8)


def model():
    return fxamp.convert(Two(lambda m, x: m.b(m.a(x).exp())), FP16, (X,))


def some_ranges():
    histogram = Histogram()
    histogram.add(X)
    return Ranges({"linear": NodeRange("linear", "linear", "", "", histogram)}, 1, FP16)


def save_plan(folder):
    return fxamp.report(model()).save_plan(folder / "file")


def save_ranges(folder):
    some_ranges().save(folder / "file")


def plot(folder):
    pytest.importorskip("matplotlib")
    some_ranges().plot(folder / "file.png")


def dump_all(folder):
    dump(model(), folder / "file")


WRITERS = [save_plan, save_ranges, plot, dump_all]


class Broken:
    """A file that takes ten characters, and then fails."""

    def __init__(self, file, error):
        self.file, self.error = file, error

    def write(self, content):
        self.file.write(content[:10])
        self.file.flush()
        raise self.error

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()


def break_files(monkeypatch, error):
    real_fdopen = os.fdopen
    monkeypatch.setattr(whole.os, "fdopen", lambda *given, **more: Broken(real_fdopen(*given, **more), error))

    def write_text(path, text, encoding=None):
        with open(path, "w", encoding=encoding) as file, Broken(file, error) as broken:
            broken.write(text)

    monkeypatch.setattr("pathlib.Path.write_text", write_text)


@pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: writer.__name__)
@pytest.mark.parametrize("is_there", [False, True], ids=["new", "over an old one"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "ctrl-c"])
def test_an_error_in_the_middle_leaves_what_was_there(writer, is_there, error, tmp_path, monkeypatch):
    if is_there:
        writer(tmp_path)
    before = contents(tmp_path)
    break_files(monkeypatch, error)
    with pytest.raises(OptionError if isinstance(error, OSError) else KeyboardInterrupt):
        writer(tmp_path)
    assert contents(tmp_path) == before


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


KILLED = """
import os, pathlib, sys, torch
sys.path.insert(0, {here!r})
import test_whole
from fxamp import whole

class Killed(test_whole.Broken):
    def write(self, content):
        self.file.write(content[:10])
        self.file.flush()
        os._exit(9)

real = os.fdopen
whole.os.fdopen = lambda *given, **more: Killed(real(*given, **more), None)
pathlib.Path.write_text = lambda path, text, encoding=None: Killed(open(path, "w"), None).write(text)
test_whole.{writer}(pathlib.Path({folder!r}))
"""


@pytest.mark.parametrize("writer", [save_plan, dump_all], ids=lambda writer: writer.__name__)
def test_a_killed_process_leaves_no_part_under_the_name(writer, tmp_path):
    text = textwrap.dedent(KILLED).format(here=os.path.dirname(__file__), writer=writer.__name__, folder=str(tmp_path))
    assert subprocess.run([sys.executable, "-c", text]).returncode == 9
    assert not (tmp_path / "file").exists()


def test_a_page_of_an_earlier_dump_does_not_stay_beside_a_new_graph(tmp_path, monkeypatch, caplog):
    dump(model(), tmp_path / "out")
    assert (tmp_path / "out" / "report.html").exists()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "jinja2" else real(name, *more)
    )
    dump(model(), tmp_path / "out")
    assert not (tmp_path / "out" / "report.html").exists() and (tmp_path / "out" / "notes.txt").exists()
