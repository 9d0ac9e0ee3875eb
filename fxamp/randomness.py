"""The random generators that all code shares: Python's, numpy's, and torch's of the CPU and of CUDA devices; and those
that somebody has made for himself.
"""

import contextlib
import random
import sys
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import torch


def generator_states(devices: Iterable[int] = ()) -> dict[str, Any]:
    """What they would give next, in what torch.load(weights_only=True) reads.

    Args:
        devices: indices of CUDA devices whose generators are among them.

    Returns:
        "python", "cpu" (torch's), "cuda" ({index: state}), and "numpy" where somebody has loaded it.
    """
    cuda = {device: torch.cuda.get_rng_state(device) for device in devices}
    states: dict[str, Any] = {"python": random.getstate(), "cpu": torch.get_rng_state(), "cuda": cuda}
    numpy = _numpy_random()
    if numpy is not None:
        states["numpy"] = as_lists(numpy.get_state(legacy=False))
    return states


def set_generators(states: dict[str, Any]) -> None:
    """Let them go on from there; those that are not named, or not here, are left alone."""
    torch.set_rng_state(states["cpu"])
    if "python" in states:
        random.setstate(states["python"])
    numpy = _numpy_random()
    if numpy is not None and "numpy" in states:
        numpy.set_state(states["numpy"])
    for device, state in states.get("cuda", {}).items():
        if device < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, device)


def moved_since(states: dict[str, Any]) -> set[str]:
    """Those of "python", "numpy" and "cpu" that have drawn since."""
    now = generator_states()
    moved: set[str] = {name for name in ("python", "numpy") if name in states and states[name] != now.get(name)}
    return moved if torch.equal(states["cpu"], now["cpu"]) else moved | {"cpu"}


@contextlib.contextmanager
def generators_kept(devices: Iterable[int] = ()) -> Iterator[None]:
    """Whatever is drawn inside, the next number is the one that would have come before."""
    before = generator_states(devices)
    try:
        yield
    finally:
        set_generators(before)


def is_generator(value: Any) -> bool:
    """Whether it is a generator that somebody has made, whose state can be had: not the random module's own, which
    `from random import random` gives the method of, nor a random.SystemRandom, which has none.
    """
    if isinstance(value, random.Random):
        return value is not _THE_MODULES and not isinstance(value, random.SystemRandom)
    if not type(value).__module__.startswith("numpy.random"):  # of others nothing is asked
        return isinstance(value, torch.Generator)
    return hasattr(value, "bit_generator") or hasattr(value, "get_state")


_THE_MODULES: Any = random.random.__self__  # type: ignore[attr-defined]


def state_of(generator: Any) -> Any:
    """The state of such a generator, in its own form."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator):
        with torch._C.DisableTorchFunction():
            return generator.get_state()
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    return generator.get_state(legacy=False)


def set_state(generator: Any, state: Any) -> None:
    """Let it go on from there."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _numpy_random() -> ModuleType | None:
    return sys.modules.get("numpy.random")


def as_lists(state: Any) -> Any:
    """The state of a generator, in Python's own numbers and lists."""
    if isinstance(state, dict):
        return {key: as_lists(value) for key, value in state.items()}
    with torch._C.DisableTorchFunction():  # a trace refuses to read a tensor's numbers
        return state.tolist() if hasattr(state, "tolist") else state
