"""The float32 master of a low-precision parameter: where it is kept, how it stays true to the parameter.

A master hangs on its Parameter as the attribute `_fxamp_master`. So it lives as long as the parameter,
survives a new optimizer, is pickled with the model, and is not shared by `copy.deepcopy`, which drops
attributes.

Who wrote last is told by autograd's version counters, and by the parameter's memory (`p.data = ...`):
`state_dict()` hands out the master itself, so it may be written too, and then the parameter takes its rounding. Until
an optimizer with masters has stepped a parameter its master is loose: a write through `parameter.data`, and the step of
a fused optimizer, leave the counter as it is, so both are compared by value at each read. (What is written so later
`fxamp.runtime.unseen_writes` looks for.)
"""

import operator
import threading
from collections.abc import Sequence

import torch

from fxamp.dtypes import LOW_DTYPES, dtype_name
from fxamp.errors import OptionError
from fxamp.runtime.agreements import AGREED, Agreement, agreed_of, agreement_of
from fxamp.runtime.copies import by_kind, is_plain
from fxamp.runtime.distributed import local, locals_of, several_ranks
from fxamp.runtime.writes import Memory, versions_of

MASTER = "_fxamp_master"
LOGICAL = "_fxamp_logical_dtype"  # on parameters that fxamp.model.storage lowered: their dtype in the state dict
LOADING = -1  # in the place of a parameter's count of writes: what is written is being loaded
WRITTEN = -2  # in the place of a master's, which no tensor has: it was written

one_at_a_time = threading.RLock()
"""Held where parameters and masters are made to agree; not while an optimizer steps, which may wait for other ranks,
and these may be threads of this process."""
in_a_step: set[int] = set()
"""Ids of parameters whose masters are being written by a step, and they not yet: `state_dict()` in another thread would
take that for a write of the user's, and undo the update."""


def master_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """The float32 value of a low-precision parameter, or None if it has no master.

    A parameter written by someone else since the last step wins over its master, element by element; before the
    first step, in a job of several ranks, as a whole. One that is float32 by now (`model.float()`) has none, one that
    was moved (`model.cuda()`) has its master beside it.
    """
    if MASTER not in parameter.__dict__:
        return None
    if not is_low(parameter):
        detach_master(parameter)
    master = stored_master(parameter)
    if master is not None and not is_unwritten(parameter):
        reconcile_(parameter)
    return master


def is_unwritten(parameter: torch.Tensor) -> bool:
    """Whether nobody has written a parameter or its master since they agreed, as far as counters and memory tell."""
    mark = agreed_of(parameter)
    return mark is not None and mark.holds(parameter, parameter.__dict__[MASTER])


def stored_master(parameter: torch.Tensor) -> torch.Tensor | None:
    """A parameter's master as it was written last, on the parameter's device, and as it lies there: `model.cuda()` and
    `model.to(memory_format=...)` move parameters alone."""
    master: torch.Tensor | None = parameter.__dict__.get(MASTER)
    if master is None:
        return None
    is_elsewhere = master.device != parameter.device
    if is_elsewhere or (laid := _laid_out_as(parameter, master)) is not master:
        is_written = is_master_written(parameter)
        with torch.inference_mode(False):  # whose tensors count no writes
            master = _laid_out_as(parameter, master.to(parameter.device)) if is_elsewhere else laid
        setattr(parameter, MASTER, master)
        if (mark := agreed_of(parameter)) is not None:
            exact = WRITTEN if is_written else master._version
            Agreement([mark.low], [exact], [mark.memory], mark.of.is_loose).note([parameter])
    return master


def is_master_written(parameter: torch.Tensor) -> bool:
    """Whether somebody has written into a master (as `state_dict()` gives it) since it agreed with its parameter."""
    mark = agreed_of(parameter)
    return mark is not None and mark.exact != parameter.__dict__[MASTER]._version


def _is_low_written(parameter: torch.Tensor) -> bool:
    """Whether a parameter was written, or given other memory, since it agreed with its master.

    A move gives it other memory, too: then a master that was written before says so.
    """
    mark = agreed_of(parameter)
    if mark is None or mark.low != parameter._version:
        return True
    return mark.exact != WRITTEN and not mark.memory.is_of(local(parameter))


def writes_since_agreed(parameter: torch.Tensor) -> int:
    """How often a parameter was written in place since its master last knew its value; 0 where that is not known."""
    mark = agreed_of(parameter)
    if mark is None or mark.low == LOADING or parameter.is_inference():
        return 0
    return parameter._version - int(mark.low)


def exact_values(parameter: torch.Tensor) -> torch.Tensor:
    """What a low-precision tensor stands for, in float32; its master where that is true by value, not by version."""
    if hasattr(parameter, MASTER):
        reconcile_(parameter)
    master: torch.Tensor | None = getattr(parameter, MASTER, None)
    return parameter.detach().float() if master is None else master


def set_master(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Give a low-precision parameter an exact float32 value: the master takes it, the parameter its rounding.

    For a parameter without a master (already float32, or no master-weight optimizer) it is a plain copy.

    Raises:
        OptionError: no tensors, or of different shapes.
    """
    for given in (parameter, value):
        if not isinstance(given, torch.Tensor):
            raise OptionError(f"set_master() takes a parameter and a tensor, got a {type(given).__name__}.")
    if value.shape != parameter.shape:
        raise OptionError(
            f"set_master() got a value of shape {tuple(value.shape)} for a parameter of shape {tuple(parameter.shape)}."
        )
    with torch.no_grad():
        parameter.copy_(value)
        master: torch.Tensor | None = getattr(parameter, MASTER, None)
        if master is not None:
            master.copy_(value)
            remember_version(parameter)


def ensure_master(parameter: torch.Tensor) -> torch.Tensor:
    """The master of a low-precision parameter, made by widening it if there is none."""
    master = master_of(parameter)
    if master is None:
        master = parameter.detach().float()
        attach_master(parameter, master)
    return master


def ensure_masters(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """`ensure_master` of each: where nobody wrote since they were stepped together, a few comparisons."""
    together = agreement_of(parameters)
    if together is not None:
        masters = _stored(parameters)
        if together.holds(parameters, masters):  # so they are where they were: on their masters' device
            return masters
    return list(map(ensure_master, parameters))


def _stored(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [parameter.__dict__[MASTER] for parameter in parameters]


def attach_master(parameter: torch.Tensor, master: torch.Tensor) -> None:
    """Make `master` (float32, same shape) the parameter's master; it is copied where its strides are others."""
    if master.dtype != torch.float32 or master.shape != parameter.shape:
        raise OptionError(
            f"a master is float32 of shape {tuple(parameter.shape)}, got {dtype_name(master.dtype)} of "
            f"{tuple(master.shape)}."
        )
    setattr(parameter, MASTER, _laid_out_as(parameter, master))
    remember_version(parameter)


def _laid_out_as(parameter: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    """The master with the parameter's strides (`model.to(memory_format=torch.channels_last)`).

    Kernels of fused optimizers go through the memory of weights and gradients, whatever their strides.
    """
    if master.stride() == parameter.stride() or not (is_plain(master) and is_plain(parameter.detach())):
        return master
    with torch.inference_mode(False), torch.no_grad():
        laid = torch.empty_like(parameter, dtype=torch.float32, requires_grad=False)
        return master if laid.stride() == master.stride() else laid.copy_(master)


def detach_master(parameter: torch.Tensor) -> None:
    """Forget a parameter's master."""
    for name in (MASTER, AGREED):
        if hasattr(parameter, name):
            delattr(parameter, name)


def remember_version(parameter: torch.Tensor, low: int | None = None) -> None:
    """Note that a parameter and its master agree now; `low` in the place of the parameter's count."""
    low, exact = parameter._version if low is None else low, parameter.__dict__[MASTER]._version
    Agreement([low], [exact], [Memory(local(parameter))], is_loose(parameter)).note([parameter])


def is_loose(parameter: torch.Tensor) -> bool:
    """Whether a parameter is compared with its master by value; so is one that came from another process."""
    mark = agreed_of(parameter)
    return hasattr(parameter, AGREED) if mark is None else mark.of.is_loose


def loosen(parameter: torch.Tensor) -> None:
    """Compare a parameter with its master by value, until an optimizer with masters has stepped it."""
    if hasattr(parameter, MASTER) and not is_loose(parameter):
        exact = WRITTEN if is_master_written(parameter) else parameter.__dict__[MASTER]._version
        Agreement([parameter._version], [exact], [Memory(local(parameter))], is_loose=True).note([parameter])


def begin_load(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """`set_master`, where the parameter's module may copy the same value once more."""
    set_master(parameter, value)
    if hasattr(parameter, MASTER) and is_loose(parameter):
        remember_version(parameter, LOADING)


def end_load(parameter: torch.Tensor) -> None:
    """What was written since `begin_load` is the loaded value."""
    mark = agreed_of(parameter)
    if mark is not None and mark.low == LOADING:
        reconcile_(parameter)


@torch.no_grad()
def round_into(parameters: list[torch.Tensor], masters: list[torch.Tensor]) -> None:
    """Give parameters the rounding of their masters, those of a device and dtype in one multi-tensor copy.

    (A CUDA kernel of torch's took the dtype of the first for all: pytorch issue 173383.)
    """
    targets, sources = locals_of(parameters), locals_of(masters)
    for _, places in by_kind(targets):
        torch._foreach_copy_([targets[place] for place in places], [sources[place] for place in places])
    _agree([parameter for parameter in parameters if MASTER in parameter.__dict__])


def _agree(parameters: list[torch.Tensor]) -> None:
    """As `remember_version`, of all at once; counts are believed from now on."""
    together = agreement_of(parameters)
    low, exact = versions_of(parameters), versions_of(_stored(parameters))
    if together is None or together.is_loose:
        Agreement(low, exact, [Memory(local(parameter)) for parameter in parameters]).note(parameters)
    else:
        together.low, together.exact = low, exact


def reconcile_(parameter: torch.Tensor) -> None:
    """Bring a master up to date with a parameter that was written directly, or a parameter with its master.

    A master that was written while the parameter was not, nor given other memory, is right as a whole. Else: where the
    parameter still is the master's rounding the master keeps its low bits, elsewhere it takes the parameter's value.

    A write before the first step of a job of several ranks is most likely the broadcast of DistributedDataParallel:
    it makes equal what is low, and leaves each rank the low bits of its own. There they are given up, on the rank
    that sent as on those that received, so that all ranks go on from the same numbers.

    While a step is under way the master is what counts, and the step ends with its rounding.
    """
    if not is_low(parameter):  # `model.double()`
        detach_master(parameter)
        return
    with one_at_a_time, torch.no_grad():
        master = stored_master(parameter)
        assert master is not None
        if id(parameter) in in_a_step:
            return
        mark = agreed_of(parameter)
        low = LOADING if mark is None else mark.low
        if is_master_written(parameter) and not _is_low_written(parameter):
            parameter.copy_(master)
        elif is_loose(parameter) and low not in (LOADING, parameter._version) and several_ranks():
            master.copy_(parameter)
        else:
            exact, values = local(master.detach()), local(parameter.detach())
            torch.where(exact.to(values.dtype) == values, exact, values, out=exact)
        remember_version(parameter)


def resync(parameter: torch.Tensor) -> None:
    """Take over what was written past the version counter; with several ranks the master's low bits go."""
    if several_ranks():
        with torch.no_grad():
            getattr(parameter, MASTER).copy_(parameter)
        remember_version(parameter)
    else:
        reconcile_(parameter)


def is_low(parameter: torch.Tensor) -> bool:
    """Whether a parameter is float16 or bfloat16."""
    return parameter.dtype in LOW_DTYPES


def are_low(parameters: Sequence[torch.Tensor]) -> bool:
    """`is_low` of all, asked at once."""
    return set(map(_DTYPE, parameters)) <= _LOW


_DTYPE = operator.attrgetter("dtype")
_LOW = frozenset(LOW_DTYPES)


def is_stored_low(tensor: object) -> bool:
    """Whether a tensor's storage was lowered, and it still stands for float32 numbers."""
    return isinstance(tensor, torch.Tensor) and hasattr(tensor, LOGICAL) and tensor.dtype in LOW_DTYPES


def logical_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype a tensor stands for: float32 for a lowered one, else its own."""
    return getattr(tensor, LOGICAL, tensor.dtype) if is_stored_low(tensor) else tensor.dtype
