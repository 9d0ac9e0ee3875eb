"""Who wrote last, parameter or master, where those of a step are asked together."""

import gc
import io
import weakref

import pytest
import torch
from torch import nn

import fxamp
from fxamp.runtime import unseen_writes
from fxamp.runtime.agreements import AGREED, agreement_of
from fxamp.runtime.master_weights import MasterWeightOptimizer
from fxamp.runtime.masters import (
    attach_master,
    begin_load,
    end_load,
    ensure_masters,
    is_loose,
    is_unwritten,
    loosen,
    master_of,
    round_into,
    stored_master,
)

BEFORE = unseen_writes.FIRST + 2
"""Steps after which an optimizer no longer compares all parameters with their masters."""


def parameters_with_masters(count=4, dtype=torch.bfloat16):
    torch.manual_seed(0)
    made = [nn.Parameter(torch.randn(3, 5, dtype=dtype)) for _ in range(count)]
    for parameter in made:
        attach_master(parameter, parameter.detach().float() * (1 + 2**-12))  # which rounds to it
    return made


def agreed(count=4):
    """Parameters whose masters were rounded into them together."""
    made = parameters_with_masters(count)
    masters = list(map(master_of, made))
    round_into(made, masters)
    return made, masters, agreement_of(made)


@torch.no_grad()
def write(parameters, masters):
    parameters[2].add_(1)


@torch.no_grad()
def write_master(parameters, masters):
    masters[2].add_(1)


def replace_data(parameters, masters):
    parameters[2].data = parameters[2].detach() + 1


def replace_and_keep_data(parameters, masters):
    kept.append(parameters[2].data)
    replace_data(parameters, masters)


kept = []


def renew_memory(parameters, masters):
    """Memory that is freed may come back at the same address: then it is another."""
    parameters[2].data = torch.empty(0)
    agreement = agreement_of(parameters)
    parameters[2].data = torch.zeros(3, 5, dtype=torch.bfloat16)
    agreement._addresses[2] = agreement.memories[2].address = parameters[2].data_ptr()


EVENTS = {
    "a write": write,
    "a write into a master": write_master,
    "other memory": replace_data,
    "other memory, and the old kept": replace_and_keep_data,
    "other memory at the same address": renew_memory,
}


def test_those_that_were_rounded_together_agree_together():
    parameters, masters, agreement = agreed()
    assert agreement is not None and agreement.holds(parameters, masters)
    assert all(map(is_unwritten, parameters)) and not any(map(is_loose, parameters))
    assert ensure_masters(parameters) == masters
    with torch.no_grad():
        torch._foreach_add_(masters, 1)
    round_into(parameters, masters)
    assert agreement_of(parameters) is agreement and agreement.holds(parameters, masters), "no new one for each step"


@pytest.mark.parametrize("event", EVENTS.values(), ids=EVENTS)
def test_together_and_one_by_one_a_change_is_seen(event):
    parameters, masters, agreement = agreed()
    event(parameters, masters)
    assert not agreement.holds(parameters, masters)
    assert [is_unwritten(parameter) for parameter in parameters] == [True, True, False, True]


def test_another_class_is_asked_one_by_one():
    parameters, masters, agreement = agreed()
    parameters[2].__class__ = type("Own", (nn.Parameter,), {})
    assert not agreement.holds(parameters, masters), "a DTensor's memory is that of its shard"
    assert all(map(is_unwritten, parameters))


def test_others_are_another_agreement():
    parameters, masters, agreement = agreed()
    assert agreement_of(parameters[:3]) is None and agreement_of(parameters[1:]) is None
    assert agreement_of(parameters[::-1]) is None and agreement_of([]) is None
    round_into(parameters[1:3], masters[1:3])
    assert agreement_of(parameters) is None and agreement_of(parameters[1:3]) not in (None, agreement)
    assert all(map(is_unwritten, parameters))


def test_loosened_is_compared_by_value_until_stepped_together_or_alone():
    for count in (1, 3):
        parameters, masters, _ = agreed(count)
        for parameter in parameters:
            loosen(parameter)
        assert all(map(is_loose, parameters)) and not any(map(is_unwritten, parameters))
        assert count > 1 or not agreement_of(parameters).holds(parameters, masters)
        assert all(master_of(parameter) is master for parameter, master in zip(parameters, masters, strict=True))
        assert all(map(is_loose, parameters)), "also after it was looked at"
        round_into(parameters, masters)
        assert all(map(is_unwritten, parameters)) and not any(map(is_loose, parameters))


def test_loosened_it_stays_when_its_master_is_laid_out_anew():
    parameter = nn.Parameter(torch.randn(2, 3, 4, 4, dtype=torch.bfloat16))
    attach_master(parameter, parameter.detach().float())
    loosen(parameter)
    parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    assert stored_master(parameter).stride() == parameter.stride() and is_loose(parameter)


def test_a_write_into_a_master_before_it_was_loosened_is_taken():
    (parameter,), (master,), _ = agreed(1)
    with torch.no_grad():
        master.fill_(0.5)
    loosen(parameter)
    assert master_of(parameter) is master and parameter.eq(0.5).all()


def test_what_is_copied_once_more_while_loading_is_no_write():
    (parameter,), _, _ = agreed(1)
    loosen(parameter)
    value = torch.full((3, 5), 1.0 + 2**-12)
    begin_load(parameter, value)
    with torch.no_grad():
        parameter.copy_(value)
    end_load(parameter)
    assert torch.equal(master_of(parameter), value), "the low bits that a module's own copy lacks"
    with torch.no_grad():
        parameter.fill_(2.0)
    assert master_of(parameter).eq(2.0).all()


def test_saved_whole_it_says_nothing_in_another_process():
    parameters, masters, _ = agreed()
    for weights_only, kept in ((True, parameters[0]), (False, nn.ParameterList(parameters))):
        file = io.BytesIO()
        torch.save(kept, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=weights_only)
        first = loaded if weights_only else loaded[0]
        assert not is_unwritten(first) and is_loose(first)
        assert torch.equal(master_of(first), masters[0])
        with torch.no_grad():
            first.data.fill_(3.0)  # which no count tells
        assert master_of(first).eq(3.0).all()


# ------------------------------------------------------------------------------------------------- under an optimizer


def trained(count=BEFORE, parts=((0, 1, 2, 3),)):
    """Parameters and an optimizer after some steps, each of which has gradients for one of the parts in turn."""
    parameters = parameters_with_masters()
    optimizer = MasterWeightOptimizer(torch.optim.SGD(parameters, 0.125))
    for step in range(count):
        stepped(parameters, optimizer, parts[step % len(parts)])
    return parameters, optimizer


def stepped(parameters, optimizer, places=(0, 1, 2, 3), gradient=0.5):
    for place in places:
        parameters[place].grad = torch.full_like(parameters[place], gradient)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("event", (write, replace_data), ids=("a write", "other memory"))
def test_a_step_starts_from_what_was_written(event):
    parameters, optimizer = trained()
    others = [master_of(parameter).clone() for parameter in parameters]
    with torch.no_grad():
        parameters[2].fill_(1.0)
    event(parameters, None)
    stepped(parameters, optimizer)
    assert parameters[2].eq(2.0 - 0.0625).all()
    for place in (0, 1, 3):
        assert torch.equal(master_of(parameters[place]), others[place] - 0.0625), "with its low bits"


def test_a_step_starts_from_what_was_written_into_a_master():
    parameters, optimizer = trained()
    with torch.no_grad():
        master_of(parameters[1]).fill_(4.0)
    stepped(parameters, optimizer)
    assert parameters[1].eq(4.0 - 0.0625).all()


@pytest.mark.parametrize("parts", [((0, 1), (2, 3)), ((0, 1, 2, 3), (1, 2)), ((0,), (0, 1, 2, 3), (3,), ())])
def test_steps_that_reach_some_parameters_only(parts):
    exact = [master_of(parameter).clone() for parameter in parameters_with_masters()]
    parameters, optimizer = trained(3 * BEFORE, parts)
    for step in range(3 * BEFORE):
        for place in parts[step % len(parts)]:
            exact[place] -= 0.0625
    for parameter, value in zip(parameters, exact, strict=True):
        assert torch.equal(master_of(parameter), value) and torch.equal(parameter, value.bfloat16())
    with torch.no_grad():
        parameters[2].fill_(1.0)
    stepped(parameters, optimizer)
    assert parameters[2].eq(1.0 - 0.0625).all()
    assert torch.equal(master_of(parameters[0]), exact[0] - 0.0625)


def test_two_optimizers_share_a_parameter():
    parameters = parameters_with_masters()
    every, some = (MasterWeightOptimizer(torch.optim.SGD(given, 0.125)) for given in (parameters, parameters[1:3]))
    exact = [master_of(parameter).clone() for parameter in parameters]
    for _ in range(BEFORE):
        stepped(parameters, every)
        stepped(parameters, some, (1, 2), gradient=0.25)
        for place, value in enumerate(exact):
            value -= 0.0625
            value -= 0.03125 if place in (1, 2) else 0.0
    assert all(map(torch.equal, map(master_of, parameters), exact))


def test_nobody_is_kept_alive():
    parameters, optimizer = trained()
    kept = weakref.ref(parameters[0]), weakref.ref(master_of(parameters[0]))
    gc.disable()
    try:
        del parameters, optimizer
        assert [each() for each in kept] == [None, None], "also without the garbage collector"
    finally:
        gc.enable()


def test_under_o2_a_state_dict_that_is_written_into_is_the_model():
    torch.manual_seed(0)
    model = fxamp.convert(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), torch.bfloat16, opt_level="O2")
    optimizer = MasterWeightOptimizer(torch.optim.SGD(model.parameters(), 0.0))
    for _ in range(BEFORE):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.state_dict()["0.weight"].fill_(0.25)
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    assert model.get_parameter("0.weight").eq(0.25).all() and AGREED in vars(model.get_parameter("0.weight"))
