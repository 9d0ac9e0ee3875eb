"""What the host reads of a GPU's numbers is there by then."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fxamp.runtime import gradients, stand_ins
from fxamp.runtime.copies import Skipped, select_
from fxamp.runtime.device_skip import step_unless
from fxamp.runtime.flat_copies import FlatCopies
from fxamp.runtime.rounding import Compensation
from fxamp.runtime.scaler_state import any_of


class CopiesToTheHost(TorchDispatchMode):
    """Notes of each copy to the host whether it is waited for."""

    def __init__(self):
        super().__init__()
        self.are_waited_for = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("device") == torch.device("cpu"):
            self.are_waited_for.append(not kwargs.get("non_blocking"))
        return func(*args, **kwargs)


def give_gradients(weight, inverse_scale):
    weight.grad = weight.clone()
    stand_ins.give_gradients([weight], [weight], inverse_scale)


class Fused(torch.optim.SGD):
    """As torch's: the step brings both numbers to its parameters' device, without waiting."""

    _step_supports_amp_scaling = True

    def step(self, closure=None):
        for number in (self.found_inf, self.grad_scale):
            number.to(self.param_groups[0]["params"][0].device, non_blocking=True)


def fused_step(weight, number):
    optimizer = Fused([weight.requires_grad_()])
    step_unless(optimizer, number, optimizer.step, grad_scale=number)


@pytest.mark.parametrize(
    "read",
    [
        lambda number, here: gradients.unscale_and_check([here], number, number),
        lambda number, here: select_([(here, here.clone())], Skipped(number)),
        lambda number, here: FlatCopies([here]).select_back(Skipped(number)),
        lambda number, here: give_gradients(here, number),
        lambda number, here: Compensation().take_back([here.bfloat16()], [here], number),
        lambda number, here: fused_step(here, number),
        lambda number, here: any_of([number, number], here.device),
    ],
    ids=["unscale", "select", "select pieces", "masters", "kahan", "fused", "flags"],
)
def test_a_number_of_a_gpu_is_waited_for_where_the_host_reads_it(read):
    """Parameters are on the host where FSDP offloads them; the scale is where the loss is."""
    with FakeTensorMode(), CopiesToTheHost() as copies:
        read(torch.ones((), device="cuda"), torch.ones(2))
    assert copies.are_waited_for and all(copies.are_waited_for)
