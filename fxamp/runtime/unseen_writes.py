"""Writes into parameters with masters that autograd does not count, as `p.data.clamp_(-c, c)` between two steps.

A step would undo them. They can be told by value alone, and comparing costs a handful of launches for each parameter.
Who writes so mostly does it after each step (clipped critics, norms that are held, pruning): so the first steps
compare, and one in many after them; where such a write is found, each does from then on. New memory (`p.data = ...`) is
told from the old (`fxamp.runtime.masters`).
"""

import logging

import torch

from fxamp import recorded
from fxamp.runtime import gradients
from fxamp.runtime.distributed import local
from fxamp.runtime.masters import MASTER, is_unwritten, reconcile_, stored_master
from fxamp.runtime.step_result import HostCopy

FIRST = 4
EVERY = 64

log = logging.getLogger("fxamp")


class UnseenWrites:
    """Lets the masters of one optimizer take such writes.

    Attributes:
        is_usual: whether one was found.
    """

    def __init__(self) -> None:
        self.is_usual = False
        self._steps = 0
        self._asked: list[tuple[list[str], HostCopy]] = []

    def take(self, optimizer: torch.optim.Optimizer) -> None:
        """To be called before each step. While a CUDA graph is recorded nothing is looked at.

        The first step takes what was written since the masters were made, as functions that initialise a model do.
        Until an answer is here, which nobody waits for, all steps compare.
        """
        mastered = (parameter for parameter in gradients.parameters(optimizer) if hasattr(parameter, MASTER))
        first = next(mastered, None)
        if first is None or recorded.is_capturing(first.device):
            return
        self._steps += 1
        self._hear()
        if not self.is_usual and not self._asked and self._steps > 1 and self._is_turn():
            self._ask(optimizer)
        if self.is_usual or self._asked or self._is_turn():
            for parameter in (first, *mastered):
                reconcile_(parameter)
            self._hear()

    def _is_turn(self) -> bool:
        return self._steps <= FIRST or self._steps % EVERY == 0

    def _ask(self, optimizer: torch.optim.Optimizer) -> None:
        asked: dict[torch.device, tuple[list[str], list[torch.Tensor]]] = {}
        for name, parameter in gradients.names(optimizer):
            if hasattr(parameter, MASTER) and is_unwritten(parameter):
                names, flags = asked.setdefault(parameter.device, ([], []))
                names.append(name)
                flags.append(_is_another(parameter))
        self._asked = [(names, HostCopy(torch.stack(flags).float())) for names, flags in asked.values()]

    def _hear(self) -> None:
        if not all(copy.is_ready for _, copy in self._asked):
            return
        found = [
            name
            for names, copy in self._asked
            for name, is_another in zip(names, copy.values, strict=True)
            if is_another
        ]
        self._asked = []
        if found:
            self.is_usual = True
            self._say(found)

    def _say(self, found: list[str]) -> None:
        is_late = self._steps > FIRST + 1
        log.log(
            logging.WARNING if is_late else logging.INFO,
            "parameters are written between steps without a trace, as `p.data.clamp_(-c, c)` does: %s.%s From now on "
            "each step compares all of them with their masters; `with torch.no_grad(): p.clamp_(-c, c)` does without.",
            gradients.listed(found),
            f" Such writes of the last {EVERY} steps may be undone." if is_late else "",
        )


def take_writes(optimizer: torch.optim.Optimizer) -> None:
    """Let masters take what the user has written into parameters, where the optimizer has masters."""
    take = getattr(optimizer, "take_writes", None)
    if take is not None and gradients.has_masters(optimizer):
        take()


def _is_another(parameter: torch.Tensor) -> torch.Tensor:
    """Whether a parameter is no rounding of its master (0-d, of this rank's part)."""
    master = stored_master(parameter)
    assert master is not None
    values = local(parameter.detach())
    differs = local(master.detach()).to(values.dtype) != values
    return differs.logical_and_(values == values).any()  # a NaN is none of a user's, and equals nothing
