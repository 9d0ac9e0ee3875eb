"""At which counts of writes parameters and their masters last agreed, and where the parameters were then.

Those that an optimizer steps together agree together. They are noted and asked together, by a few passes in C, at a
tenth of a microsecond a pass and parameter.
"""

from collections.abc import Sequence
from typing import Any

import torch

from fxamp.runtime.distributed import PLAIN, local
from fxamp.runtime.writes import EXPIRED, Memory, versions_of

AGREED = "_fxamp_master_agreed"


class Agreement:
    """Of parameters and masters that agreed at one time. It keeps neither alive.

    Attributes:
        low, exact: counts of the parameters, and of the masters.
        memories: of the parameters.
        is_loose: counts are not believed: parameters are compared with their masters by value.
    """

    def __init__(self, low: list[Any], exact: list[Any], memories: list[Memory], is_loose: bool = False) -> None:
        self.low = low
        self.exact = exact
        self.memories = memories
        self.is_loose = is_loose
        self._addresses = [memory.address for memory in memories]
        self._storages = [memory.storage.cdata for memory in memories]
        self._parts = [Agreed(self, place) for place in range(len(memories))]

    def note(self, parameters: Sequence[torch.Tensor]) -> None:
        """Let each parameter say that it is of this."""
        for parameter, part in zip(parameters, self._parts, strict=True):
            setattr(parameter, AGREED, part)

    def is_of(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether all of them, and no others, are of this."""
        return [parameter.__dict__.get(AGREED) for parameter in parameters] == self._parts

    def holds(self, parameters: Sequence[torch.Tensor], masters: Sequence[torch.Tensor]) -> bool:
        """`Agreed.holds` of all of them."""
        return (
            not self.is_loose
            and self.low == versions_of(parameters)
            and self.exact == versions_of(masters)
            and set(map(type, parameters)) <= PLAIN
            and list(map(torch.Tensor.data_ptr, parameters)) == self._addresses
            and not any(map(EXPIRED, self._storages))
        )


class Agreed:
    """One parameter's part in an agreement."""

    __slots__ = ("_place", "of")

    def __init__(self, agreement: Agreement, place: int) -> None:
        self.of = agreement
        self._place = place

    def __reduce__(self) -> Any:
        return complex, (0,)  # counts and memory are others in another process; read by torch.load(weights_only=True)

    @property
    def low(self) -> Any:
        """The count of the parameter."""
        return self.of.low[self._place]

    @property
    def exact(self) -> Any:
        """The count of its master."""
        return self.of.exact[self._place]

    @property
    def memory(self) -> Memory:
        """The parameter's."""
        return self.of.memories[self._place]

    def holds(self, parameter: torch.Tensor, master: torch.Tensor) -> bool:
        """Whether nobody has written either since, as far as counts and memory tell."""
        return (
            not self.of.is_loose
            and self.low == parameter._version
            and self.exact == master._version
            and self.memory.is_of(local(parameter))
        )


def agreed_of(parameter: torch.Tensor) -> Agreed | None:
    """A parameter's; None where it has none, or came from another process."""
    found = parameter.__dict__.get(AGREED)
    return found if isinstance(found, Agreed) else None


def agreement_of(parameters: Sequence[torch.Tensor]) -> Agreement | None:
    """That of all of them, and of no others; None where they agreed at different times."""
    first = agreed_of(parameters[0]) if parameters else None
    return first.of if first is not None and first.of.is_of(parameters) else None
