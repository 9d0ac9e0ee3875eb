"""Files are whole or not there: a disk that is full, Control-C and a killed process in the middle of every writer."""

import importlib.util
import os
import stat
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from review_cases import FP16, Two

import fxamp
from fxamp import whole
from fxamp.errors import CheckpointError, OptionError
from fxamp.numerics.histogram import Histogram
from fxamp.numerics.ranges import NodeRange, Ranges
from fxamp.numerics.ranges_file import load_ranges
from fxamp.review.dump import dump

X = torch.linspace(-1, 1, 32).reshape(4, 8)


def model():
    return fxamp.convert(Two(lambda m, x: m.b(m.a(x).exp())), FP16, (X,))


def some_ranges():
    histogram = Histogram()
    histogram.add(X)
    return Ranges({"linear": NodeRange("linear", "linear", "", "", values=histogram)}, 1, FP16)


def save_plan(folder):
    return fxamp.report(model()).save_plan(folder / "file")


def save_ranges(folder):
    some_ranges().save(folder / "file")


def plot(folder):
    pytest.importorskip("matplotlib")
    some_ranges().plot(folder / "file.png")


def dump_all(folder):
    dump(model(), folder / "file")


class Bytes:
    def __fspath__(self):
        return b"abc"


WRITERS = [save_plan, save_ranges, plot, dump_all]


IMPOSSIBLE = [
    ("a\0b", r"'a\\x00b' holds a NUL character"),
    (Path("a\0b"), r"'a\\x00b' holds a NUL character"),
    ("", r"'' is empty"),
    ("a\ud800b", r"'a\\ud800b' holds what no file's name can"),
    (None, r"None is no path"),
    (3, r"3 is no path"),
    (b"abc", r"b'abc' is no path"),
    (Bytes(), r"b'abc' is no path"),
]
PUBLIC = {
    "the plan cannot be written: path": lambda path: fxamp.report(model()).save_plan(path),
    "the ranges cannot be written: path": lambda path: some_ranges().save(path),
    "the picture cannot be written: path": lambda path: some_ranges().plot(path),
    "the dump cannot be written: directory": lambda path: dump(model(), path),
    "the ranges cannot be read: path": load_ranges,
    "the checkpoint cannot be written: path": lambda path: fxamp.save_checkpoint(path, step=1),
    "the checkpoint cannot be read: path": fxamp.load_checkpoint,
}


@pytest.mark.parametrize("what", PUBLIC)
@pytest.mark.parametrize(("path", "said"), IMPOSSIBLE, ids=lambda value: repr(value)[:12])
def test_what_no_path_can_be_is_said(what, path, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = CheckpointError if "checkpoint" in what else OptionError
    with pytest.raises(error, match=rf"^{what}={said}.* Give a str or a pathlib\.Path"):
        PUBLIC[what](path)
    assert not contents(tmp_path)


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


def test_a_full_device_stays_a_device(tmp_path):
    with pytest.raises(OptionError, match=r"the plan cannot be written to .*full.*No space left on device"):
        whole.write_whole(device(tmp_path / "full", 7), "text", "the plan")
    assert stat.S_ISCHR(os.stat(tmp_path / "full").st_mode)
    assert os.listdir(tmp_path) == ["full"]


def device(path, minor):
    """A device node of one's own: the machine's would be lost to a defect. 7: full."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, minor))
        with open(path, "wb"):
            return path
    except (OSError, AttributeError) as error:
        pytest.skip(f"no device node can be made and opened here: {error}")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
def test_a_named_pipe_is_written_into(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    read = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()), daemon=True)
    reader.start()
    assert whole.write_whole(tmp_path / "pipe", "text", "the plan") == tmp_path / "pipe"
    assert stat.S_ISFIFO(os.stat(tmp_path / "pipe").st_mode)
    reader.join(10)
    assert read == ["text"]


TO_STDOUT = """
import pathlib
from fxamp.whole import write_whole
print("before")
write_whole(pathlib.Path("stdout"), "text\\n", "the plan")
print("after")
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/fd/1"), reason="no /proc, in which /dev/stdout points")
@pytest.mark.parametrize("kind", ["a pipe", "a file"])
def test_standard_output_gets_it_in_its_place(kind, tmp_path):
    (tmp_path / "stdout").symlink_to("/proc/self/fd/1")  # as /dev/stdout, which a defect would destroy
    with open(tmp_path / "out", "wb") as out:
        target = subprocess.PIPE if kind == "a pipe" else out
        done = subprocess.run([sys.executable, "-c", TO_STDOUT], stdout=target, cwd=tmp_path, check=True)
    assert (done.stdout or (tmp_path / "out").read_bytes()).decode() == "before\ntext\nafter\n"
    assert (tmp_path / "stdout").is_symlink()


@pytest.mark.parametrize("is_there", [True, False], ids=["to a file", "to nothing yet"])
def test_a_link_stays_and_its_file_is_written(is_there, tmp_path):
    (tmp_path / "shared").mkdir()
    if is_there:
        (tmp_path / "shared" / "plan").write_text("old")
    (tmp_path / "plan").symlink_to("shared/plan")
    assert whole.write_whole(tmp_path / "plan", "new", "the plan") == tmp_path / "plan"
    assert (tmp_path / "plan").is_symlink()
    assert (tmp_path / "shared" / "plan").read_text() == "new"
    assert os.listdir(tmp_path / "shared") == ["plan"]


def test_a_link_in_a_circle_is_said(tmp_path):
    (tmp_path / "plan").symlink_to("plan")
    with pytest.raises(OptionError, match=r"the plan cannot be written to .*symbolic links"):
        whole.write_whole(tmp_path / "plan", "new", "the plan")


@pytest.mark.parametrize("umask, mode", [(0o077, 0o600), (0o022, 0o644), (0o002, 0o664)])
def test_a_new_file_has_the_mode_that_the_umask_leaves(umask, mode, tmp_path):
    before = os.umask(umask)
    try:
        whole.write_whole(tmp_path / "plan", "new", "the plan")
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(tmp_path / "plan").st_mode) == mode


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666])
def test_a_file_that_is_there_keeps_its_mode(mode, tmp_path):
    (tmp_path / "plan").write_text("old")
    os.chmod(tmp_path / "plan", mode)
    whole.write_whole(tmp_path / "plan", "new", "the plan")
    assert stat.S_IMODE(os.stat(tmp_path / "plan").st_mode) == mode
    assert (tmp_path / "plan").read_text() == "new"


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
