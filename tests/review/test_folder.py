"""A folder holds one set of files, whatever happens while the next is put into it."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fxamp.review import folder
from fxamp.review.folder import replaced_together

NAMES = ("a.txt", "b.txt", "c.txt", "d.txt")


def put(target, text, names=NAMES):
    with replaced_together(target, NAMES) as draft:
        for name in names:
            (draft / name).write_text(text)


def held(target):
    return {path.name: path.read_text() for path in target.iterdir() if path.is_file()}


@pytest.fixture
def target(tmp_path):
    """A set without b.txt, and a file of the user's."""
    made = tmp_path / "made"
    put(made, "old", ("a.txt", "c.txt", "d.txt"))
    (made / "notes.txt").write_text("mine")
    (made / "mine").mkdir()
    return made


OLD = {"a.txt": "old", "c.txt": "old", "d.txt": "old", "notes.txt": "mine"}
NEW = {"a.txt": "new", "b.txt": "new", "c.txt": "new", "notes.txt": "mine"}


def test_the_set_is_replaced_and_the_rest_is_kept(target):
    put(target, "new", ("a.txt", "b.txt", "c.txt"))
    assert held(target) == NEW
    assert sorted(path.name for path in target.iterdir()) == sorted([*NEW, "mine"]), "and no draft is left"


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "^C"])
@pytest.mark.parametrize("step", ["mkdir", "fsync", "rename", "replace", "iterdir"])
@pytest.mark.parametrize("is_new", [False, True])
def test_what_raises_at_any_step_leaves_the_folder_as_it_was(tmp_path, target, monkeypatch, step, error, is_new):
    """Each call of each function that the work consists of raises in turn."""
    place = tmp_path / "fresh" if is_new else target
    owner = Path if step == "iterdir" else os
    real, calls = getattr(owner, step), []
    for number in range(1, 60):
        calls.clear()

        def spoilt(*given, number=number, **more):
            calls.append(given)
            if len(calls) == number:
                raise error
            return real(*given, **more)

        monkeypatch.setattr(owner, step, spoilt)
        try:
            put(place, "new", ("a.txt", "b.txt", "c.txt"))
        except type(error):
            pass
        finally:
            monkeypatch.setattr(owner, step, real)
        if len(calls) < number:
            break
        whole = {name: text for name, text in NEW.items() if name != "notes.txt" or not is_new}
        if place.is_dir() and held(place) == whole:
            if not is_new:
                put(target, "old", ("a.txt", "c.txt", "d.txt"))
            else:
                folder.shutil.rmtree(place)
        else:
            assert not place.exists() if is_new else held(place) == OLD, f"{step} number {number}"
        home = tmp_path if is_new else target
        assert not [path for path in home.iterdir() if path.name.startswith(".")], f"{step} number {number}"
    else:
        pytest.fail(f"{step} never ends")


# Puts "1", "2", ... into a folder. The module alone is loaded, quickly, and no torch; where a number is given, the
# process is killed just before so-manieth of the calls that change what is on the disk.
SCRIPT = """
import importlib, itertools, os, signal, sys, types
from pathlib import Path
for name, place in zip(("torch", "fxamp", "fxamp.review"), (Path(), *reversed(Path(sys.argv[1]).parents[:2]))):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__, sys.modules[name].__file__ = [str(place)], str(place / "__init__.py")
folder = importlib.import_module("fxamp.review.folder")
target, fatal, sets = Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
count = itertools.count(1)

def hook(event, given):
    changes = event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir") or (event == "open" and given[1] != "r")
    if fatal and changes and next(count) == fatal:
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(hook)
for number in itertools.count(1) if sets == 0 else range(1, sets + 1):
    names = ("a.txt", "b.txt", "c.txt", "d.txt")
    with folder.replaced_together(target, names) as draft:
        for name in names[: 3 + number % 2]:
            (draft / name).write_text(str(number))
    if number == 1:
        print("begun", flush=True)
"""


def started(place, fatal, sets):
    command = [sys.executable, "-c", SCRIPT, folder.__file__, str(place), str(fatal), str(sets)]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def assert_of_one_set(place, when):
    found = held(place)
    assert found.pop("notes.txt") == "mine", when
    assert found.keys() <= set(NAMES) and len(set(found.values())) <= 1, f"{when}: {found}"
    return found


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_a_process_killed_at_any_step_leaves_files_of_one_set_and_the_next_mends_it(target):
    seen = set()
    for fatal in range(1, 200):
        process = started(target, fatal, 1)
        process.communicate()
        found = assert_of_one_set(target, f"killed at step {fatal}")
        seen.add(("old" in found.values(), len(found)))
        put(target, "old", ("a.txt", "c.txt", "d.txt"))
        assert held(target) == OLD
        if process.returncode == 0:
            break
    assert process.returncode == 0 and fatal > 15
    assert {(True, 1), (False, 1)} <= seen, "killed between the old files and the new"
    drafts = [path for path in target.iterdir() if path.name.startswith(".")]
    assert drafts, "of the killed"
    for draft in drafts:
        os.utime(draft, (time.time() - 7200,) * 2)
    put(target, "new", ("a.txt", "b.txt", "c.txt"))
    assert sorted(path.name for path in target.iterdir()) == sorted([*NEW, "mine"])


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_a_process_killed_at_random_moments_leaves_files_of_one_set(target):
    chance = random.Random(0)
    for trial in range(20):
        process = started(target, 0, 0)
        assert process.stdout.readline() == b"begun\n"
        time.sleep(chance.random() * 0.02)
        process.kill()
        process.communicate()
        assert_of_one_set(target, f"trial {trial}")


def test_two_processes_at_once_leave_a_whole_set(target):
    processes = [started(target, 0, 100) for _ in range(2)]
    assert [process.communicate() and process.returncode for process in processes] == [0, 0]
    assert held(target)["a.txt"] == "100" and held(target)["notes.txt"] == "mine"


def test_a_young_draft_is_another_processs(target):
    (target / ".fxamp-draft-x").mkdir()
    put(target, "new")
    assert (target / ".fxamp-draft-x").is_dir()


def test_a_folder_of_the_users_in_a_files_place_is_kept(target):
    (target / "b.txt").mkdir()
    (target / "b.txt" / "mine").write_text("mine")
    with pytest.raises(IsADirectoryError, match=r"b\.txt is a folder there"):
        put(target, "new")
    (target / "b.txt" / "mine").unlink()
    (target / "b.txt").rmdir()
    assert held(target) == OLD


def test_a_folder_that_another_process_makes_meanwhile_is_filled(tmp_path):
    with replaced_together(tmp_path / "late", NAMES) as draft:
        (draft / "a.txt").write_text("new")
        put(tmp_path / "late", "theirs")
        (tmp_path / "late" / "notes.txt").write_text("mine")
    assert held(tmp_path / "late") == {"a.txt": "new", "notes.txt": "mine"}


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_beside_a_folder_nothing_need_be_written(tmp_path, target):
    tmp_path.chmod(0o500)
    try:
        put(target, "new", ("a.txt", "b.txt", "c.txt"))
        assert held(target) == NEW
    finally:
        tmp_path.chmod(0o700)
