"""Checkpoints in one file, written so that a process killed at any moment leaves the last good one."""

import io
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fxamp.errors import CheckpointError, nearest

FORMAT = 1
PARTS = ("model", "optimizer", "scaler")


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

    The file appears under a temporary name beside `path`, reaches the disk, and is then renamed over `path`:
    a reader finds the old checkpoint or the new one, complete, whenever the writer dies. What a killed writer
    left behind (`.<name>.<random>.part`) is removed by the next save. The states of torch's random generators
    are saved too, so that dropout and shuffling continue.

    Args:
        model, optimizer, scaler: whatever has a `state_dict`; a converted model's is float32 under the
            model's own names.
        extra: anything `torch.load(weights_only=True)` can read: numbers, text, tensors, state dicts.

    Raises:
        CheckpointError: the directory does not exist, the file cannot be written, or something cannot be pickled
            (named).
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise CheckpointError(f"{path.parent} is not a directory; create it before saving {path.name}.")
    content: dict[str, Any] = {"fxamp_checkpoint": FORMAT, "random": _random_state(), "extra": extra}
    for name, part in zip(PARTS, (model, optimizer, scaler), strict=True):
        if part is not None:
            content[name] = part.state_dict()
    _write_atomically(path, content)


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
    if only `model` is given. Everything is read and checked before anything is changed.

    Args:
        model, optimizer, scaler: what to restore; parts of the file that are not asked for are ignored.
        restores_random: also set torch's random generators.
        map_location: as for torch.load; the objects keep their devices.

    Raises:
        CheckpointError: no such file, a damaged one, a part that it lacks, or a part that does not fit.
    """
    path = Path(path)
    content = _read(path, map_location)
    wanted = {name: part for name, part in zip(PARTS, (model, optimizer, scaler), strict=True) if part is not None}
    if "fxamp_checkpoint" not in content:
        content = _as_plain_weights(path, content, wanted)
    missing = [name for name in wanted if name not in content]
    if missing:
        has = [name for name in PARTS if name in content]
        raise CheckpointError(f"{path} has no state for {missing}; it has {has or 'none of these'}.")
    if model is not None:
        _check_names(path, model, content["model"])
    for name, part in wanted.items():
        _apply(path, name, part, content[name])
    if restores_random and "random" in content:
        _set_random_state(content["random"])
    extra: dict[str, Any] = content.get("extra", {})
    return extra


def _write_atomically(path: Path, content: dict[str, Any]) -> None:
    for left_behind in path.parent.glob(f".{path.name}.*.part"):
        left_behind.unlink(missing_ok=True)
    temporary = path.parent / f".{path.name}.{secrets.token_hex(4)}.part"
    try:
        with open(temporary, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except Exception as error:
        culprit = "" if isinstance(error, OSError) else _unpicklable(content)
        message = f"{path} could not be written: {culprit}{error}. The last one is intact."
        raise CheckpointError(message) from error
    finally:
        temporary.unlink(missing_ok=True)
    _sync_directory(path.parent)


def _unpicklable(content: dict[str, Any]) -> str:
    """Names what torch.save() refuses, or "" if each part alone can be saved."""
    for name, value in {**content["extra"], **{part: content[part] for part in PARTS if part in content}}.items():
        try:
            torch.save(value, io.BytesIO())
        except Exception:
            return f"{name}= ({type(value).__name__}) cannot be pickled; leave it out, or save its numbers: "
    return ""


def _sync_directory(directory: Path) -> None:
    """Bring the rename itself to the disk, where directories can be opened (not on Windows)."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path, map_location: Any) -> dict[str, Any]:
    if not path.is_file():
        beside = [other.name for other in path.parent.glob("*")] if path.parent.is_dir() else []
        raise CheckpointError(f"{path} does not exist.{nearest(path.name, beside)}")
    try:
        content = torch.load(path, map_location=map_location, weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {error}") from error
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not a checkpoint.")
    return dict(content)


def _as_plain_weights(path: Path, content: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    if list(wanted) == ["model"] and all(isinstance(value, torch.Tensor) for value in content.values()):
        return {"model": content}
    raise CheckpointError(
        f"{path} was not written by fxamp.save_checkpoint. A plain state dict loads with model= alone; it has "
        f"the entries {sorted(map(str, content))[:8]}."
    )


def _check_names(path: Path, model: torch.nn.Module, state: Mapping[str, Any]) -> None:
    now = model.state_dict()
    missing, unexpected = sorted(now.keys() - state.keys()), sorted(state.keys() - now.keys())
    shapes = [
        f"{name} is {tuple(state[name].shape)} in the file, {tuple(now[name].shape)} in the model"
        for name in now.keys() & state.keys()
        if isinstance(now[name], torch.Tensor) and now[name].shape != state[name].shape
    ]
    if missing or unexpected or shapes:
        raise CheckpointError(
            f"{path} does not fit the model: missing {missing[:8]}, unexpected {unexpected[:8]}, "
            f"shapes {shapes[:8]}. Nothing was changed."
        )


def _apply(path: Path, name: str, part: Any, state: Any) -> None:
    try:
        part.load_state_dict(state)
    except (KeyError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"the {name} of {path} does not fit: {error}") from error


def _random_state() -> dict[str, Any]:
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"].cpu())
    saved = state.get("cuda", [])
    if saved and torch.cuda.is_available() and len(saved) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([each.cpu() for each in saved])
