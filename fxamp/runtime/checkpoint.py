"""Checkpoints in one file, written so that a process killed at any moment leaves the last good one."""

import contextlib
import copy
import functools
import io
import os
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from fxamp.errors import CheckpointError, nearest
from fxamp.randomness import generator_states, set_generators
from fxamp.runtime.arguments import checked_flag
from fxamp.runtime.gradients import has_masters
from fxamp.runtime.master_checks import check_groups, check_state, group_keys
from fxamp.whole import checked_path, put_whole, remove_drafts

FORMAT = 1
KINDS = {"model": torch.nn.Module, "optimizer": torch.optim.Optimizer, "scaler": torch.amp.GradScaler}
PARTS = tuple(KINDS)


def save_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: torch.amp.GradScaler | None = None,
    **extra: Any,
) -> None:
    """Write everything a run needs to continue into one file, atomically.

        fxamp.save_checkpoint("last.pt", model=model, optimizer=optimizer, scaler=scaler, step=1000)

    The file appears under a temporary name beside `path`, reaches the disk, is looked at as `load_checkpoint` will
    read it, and is then renamed over `path`: a reader finds the old checkpoint or the new one, complete, whenever the
    writer dies. What a killed writer left behind (`.<name>.<random>.part`) is removed by the next save. A link is
    followed, and a file that is there keeps its mode and owner. The states of the random generators (torch's, Python's
    and numpy's) are saved too, so that dropout, shuffling and augmentation continue.

    Args:
        path: the file; its directory is there already.
        model, optimizer, scaler: whatever has a `state_dict`; a converted model's is float32 under the
            model's own names.
        extra: anything `torch.load(weights_only=True)` can read: numbers, text, tensors, state dicts.

    Raises:
        CheckpointError: the directory does not exist, a part is none, the file cannot be written, or something cannot
            be pickled or could not be read back (named). What was at `path` is there still.
    """
    path = checked_path(path, "the checkpoint cannot be written", error=CheckpointError)
    parts = _checked_parts(model, optimizer, scaler)
    if not _asked(path.parent, Path.is_dir):
        raise CheckpointError(f"{path.parent} is not a directory; create it before saving {path.name}.")
    content: dict[str, Any] = {"fxamp_checkpoint": FORMAT, "random": _generators(), "extra": extra}
    content.update({name: part.state_dict() for name, part in parts.items()})
    try:
        remove_drafts(path)
        put_whole(path, functools.partial(_write, content), check=_check_readable)
    except Exception as error:
        # torch.save() makes an error about its archive of a full disk's.
        failed = error.__context__ if isinstance(error.__context__, OSError) else error
        reason = failed if isinstance(failed, OSError) else _culprit(content) or error
        raise CheckpointError(f"{path} could not be written: {reason}. The last one is intact.") from error


def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: torch.amp.GradScaler | None = None,
    restores_random: bool = True,
    map_location: Any = "cpu",
) -> dict[str, Any]:
    """Read a checkpoint into the given objects, and return its `extra`.

    A plain file of float32 weights (`torch.save(model.state_dict(), path)`) loads into a converted model too,
    if only `model` is given. Where anything does not fit, nothing is changed: until all parts are loaded a copy of the
    model's state stays in host memory (as large as the file's), and an optimizer's old state is not freed.

    Args:
        path: what `save_checkpoint` wrote, or a plain file of weights.
        model, optimizer, scaler: what to restore; parts of the file that are not asked for are ignored.
        restores_random: also set the random generators: torch's, Python's, and numpy's where it is loaded.
        map_location: as for torch.load; the objects keep their devices.

    Returns:
        The `extra` of `save_checkpoint`, {} where there was none.

    Raises:
        CheckpointError: no such file, a damaged one, a part that it lacks, or a part that is none or does not fit.
        OptionError: `restores_random` is no flag.
    """
    restores_random = checked_flag("restores_random", restores_random)
    path = checked_path(path, "the checkpoint cannot be read", error=CheckpointError)
    wanted = _checked_parts(model, optimizer, scaler)
    content = _read(path, map_location)
    if "fxamp_checkpoint" not in content:
        content = _as_plain_weights(path, content, wanted)
    missing = [name for name in wanted if name not in content]
    if missing:
        has = [name for name in PARTS if name in content]
        raise CheckpointError(f"{path} has no state for {missing}; it has {has or 'none of these'}.")
    random = _on_cpu(content["random"]) if restores_random and "random" in content else None
    with contextlib.ExitStack() as put_back:
        if random is not None:
            put_back.callback(set_generators, _generators())
            _apply(path, "random state", set_generators, random)
        # What can be put back whole comes first: of an optimizer's masters the weights keep no low bits.
        for name in ("scaler", "model", "optimizer"):
            if name in wanted:
                put_back.callback(_putting_back(path, name, wanted[name], content[name]))
                _apply(path, name, functools.partial(_load, wanted[name]), content[name])
        put_back.pop_all()
    if random is not None:
        set_generators(random)  # whatever loading has drawn
    extra: dict[str, Any] = content.get("extra", {})
    return extra


def _checked_parts(*parts: Any) -> dict[str, Any]:
    """{name: part} of those given."""
    given = {name: part for name, part in zip(PARTS, parts, strict=True) if part is not None}
    for name, part in given.items():
        kind = f"the class {part.__name__}" if isinstance(part, type) else f"a {type(part).__name__}"
        others = tuple(each for other, each in KINDS.items() if other != name)
        if isinstance(part, (*others, type)):
            raise CheckpointError(f"{name}= is {kind}; give the {name} itself. Nothing was changed.")
        if not (callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None))):
            raise CheckpointError(
                f"{name}= is {kind}, which has no state_dict() and load_state_dict(): give the {name} itself. "
                "Nothing was changed."
            )
    return given


def _check_readable(draft: Path) -> None:
    """Unpickle as `_read` will; tensors are mapped, and not read."""
    try:
        torch.load(os.fspath(draft), map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap" not in str(error):  # some file systems have none: nothing is known then
            raise


def _culprit(content: dict[str, Any]) -> str:
    """Names what torch.save() or torch.load() refuses, and why; "" if each part alone passes."""
    for name, value in {**content["extra"], **{part: content[part] for part in PARTS if part in content}}.items():
        what = f"{name}= ({type(value).__name__})"
        file = io.BytesIO()
        try:
            torch.save(value, file)
        except Exception as error:
            return f"{what} cannot be pickled; leave it out, or save its numbers: {error}"
        try:
            torch.load(io.BytesIO(file.getvalue()), map_location="cpu", weights_only=True)
        except Exception as error:
            classes = ", ".join(torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(file.getvalue())))
            return (
                f"{what} is nothing that torch.load(weights_only=True) reads back: {classes or error}. Save plain "
                "numbers, text, lists, dicts and tensors (vars() of a Namespace, item() of a numpy number), or allow "
                "the class by torch.serialization.add_safe_globals"
            )
    return ""


def _read(path: Path, map_location: Any) -> dict[str, Any]:
    if _asked(path, Path.is_dir):
        raise CheckpointError(f"{path} is a directory; give the file in it that save_checkpoint() wrote.")
    if not _asked(path, Path.is_file):
        beside = [other.name for other in path.parent.glob("*") if other.is_file()] if path.parent.is_dir() else []
        raise CheckpointError(f"{path} does not exist.{nearest(path.name, beside)}")
    try:
        content = torch.load(path, map_location=map_location, weights_only=True)
        if isinstance(content, Mapping) and "fxamp_checkpoint" in content:
            _check_sums(path)
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read as a checkpoint: it is damaged, no file of torch.save, or map_location= is no "
            f"device of this machine ({type(error).__name__}: {error})."
        ) from error
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not a checkpoint.")
    if (written := content.get("fxamp_checkpoint", FORMAT)) != FORMAT:
        raise CheckpointError(
            f"{path} is of format {written!r}, and this fxamp reads {FORMAT}: take the one that wrote it."
        )
    return dict(content)


def _asked(path: Path, question: Callable[[Path], bool]) -> bool:
    """Ask the file system about a path, which it may refuse: a name too long, a directory that is not ours."""
    try:
        return question(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be reached: {error}.") from error


def _check_sums(path: Path) -> None:
    """Compare what the file holds with the check sums in it, which torch writes and does not read."""
    with zipfile.ZipFile(path) as archive:
        if damaged := archive.testzip():
            raise zipfile.BadZipFile(f"the check sum of {damaged} is wrong")


def _write(content: dict[str, Any], file: Any) -> None:
    chosen = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        torch.save(content, file)
    finally:
        torch.serialization.set_crc32_options(chosen)


def _as_plain_weights(path: Path, content: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    if list(wanted) == ["model"] and all(isinstance(value, torch.Tensor) for value in content.values()):
        return {"model": content}
    raise CheckpointError(
        f"{path} was not written by fxamp.save_checkpoint. A plain state dict loads with model= alone; it has "
        f"the entries {sorted(map(str, content))[:8]}."
    )


def _putting_back(path: Path, name: str, part: Any, state: Any) -> Callable[[], object]:
    """What makes a part again what it is now, whatever loading `state` does; a model's names are checked here."""
    if isinstance(part, torch.optim.Optimizer):
        # Loading gives an optimizer new dicts and tensors, and writes into none that it has.
        entries, groups = dict(part.state), [(group, dict(group)) for group in part.param_groups]

        def restore() -> None:
            part.state.clear()
            part.state.update(entries)
            part.param_groups = [group for group, _ in groups]
            for group, values in groups:
                group.clear()
                group.update(values)

        return restore
    now = part.state_dict()
    if name == "model":
        _check_names(path, now, state)
    before = copy.copy(now)  # with the versions of the modules' entries, an attribute of a state dict
    for key, value in now.items():
        if is_lazy(value):  # has no numbers yet
            del before[key]
            continue
        is_held = isinstance(value, torch.Tensor) and not value.is_meta
        before[key] = value.to("cpu", copy=True) if is_held else copy.deepcopy(value)
    if len(before) < len(now):
        return lambda: part.load_state_dict(before, strict=False)
    return lambda: part.load_state_dict(before)


def _check_names(path: Path, now: Mapping[str, Any], state: Any) -> None:
    if not isinstance(state, Mapping):
        raise CheckpointError(f"the model of {path} does not fit: it is a {type(state).__name__}, no state dict.")
    missing, unexpected = sorted(now.keys() - state.keys()), sorted(state.keys() - now.keys())
    shapes = [
        f"{name} is {_shape(state[name])} in the file, {_shape(now[name])} in the model"
        for name in now.keys() & state.keys()
        if isinstance(now[name], torch.Tensor) and not is_lazy(now[name])
        if now[name].shape != getattr(state[name], "shape", None)
    ]
    if missing or unexpected or shapes:
        raise CheckpointError(
            f"{path} does not fit the model: missing {missing[:8]}, unexpected {unexpected[:8]}, "
            f"shapes {shapes[:8]}. Nothing was changed."
        )


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def _apply(path: Path, name: str, load: Callable[[Any], object], state: Any) -> None:
    try:
        load(state)
    except Exception as error:  # whatever a class raises at a state that is not its own
        reason = str(error).rstrip(".")
        if isinstance(error, KeyError):
            reason = f"it lacks {reason}, so it is of another class"
        raise CheckpointError(f"the {name} of {path} does not fit: {reason}. Nothing was changed.") from error


def _load(part: Any, state: Any) -> None:
    is_optimizer = isinstance(part, torch.optim.Optimizer)
    keys = group_keys(part) if is_optimizer else []
    if is_optimizer and not has_masters(part):  # which look themselves
        check_state(part, state)
    part.load_state_dict(state)
    if is_optimizer:
        check_groups(part.param_groups, keys)


def _generators() -> dict[str, Any]:
    uses_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return generator_states(range(torch.cuda.device_count()) if uses_cuda else ())


def _on_cpu(states: Any) -> Any:
    """States of random generators, wherever `map_location` has put them."""
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, states)
