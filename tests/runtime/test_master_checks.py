"""What a MasterWeightOptimizer refuses: the error names the culprit, and nothing has changed."""

import copy

import pytest
import torch

from fxamp.errors import OptionError
from fxamp.runtime.master_weights import MasterWeightOptimizer


class AroundAnother(torch.optim.Optimizer):
    """As Lookahead of pytorch_optimizer: no Optimizer.__init__, and the groups are another's."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)


@pytest.mark.parametrize("bytes_given", [0, -1, None, "1", 1.5, True])
def test_a_bucket_that_is_no_number_of_bytes_is_refused(bytes_given):
    inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(2).bfloat16())], 0.1)
    with pytest.raises(OptionError, match=rf"bucket_bytes={bytes_given!r} must be a whole number >= 1"):
        MasterWeightOptimizer(inner, bucket_bytes=bytes_given)
    assert not hasattr(inner.param_groups[0]["params"][0], "_fxamp_master")


def test_an_optimizer_around_another_is_refused():
    weight = torch.nn.Parameter(torch.ones(2).bfloat16())
    with pytest.raises(OptionError, match=r"AroundAnother.*around the AdamW.*opt_level='O1'"):
        MasterWeightOptimizer(AroundAnother(torch.optim.AdamW([weight])))
    assert not hasattr(weight, "_fxamp_master")


def test_a_closure_that_cannot_be_called_is_refused():
    weight = torch.nn.Parameter(torch.ones(2).bfloat16())
    with pytest.raises(OptionError, match=r"closure=5.*returns the loss"):
        MasterWeightOptimizer(torch.optim.SGD([weight], 0.1)).step(5)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda _: None, "NoneType.*optimizer.state_dict"),
        (lambda _: 5, "int.*optimizer.state_dict"),
        (lambda _: {}, r"has no 'state' and no 'param_groups'"),
        (lambda state: {"state": state["state"]}, r"has no 'param_groups'"),
        (lambda state: {**state, "state": [1]}, "'state' is a list"),
        (lambda state: {**state, "param_groups": 5}, "'param_groups' is a int"),
        (lambda state: {**state, "param_groups": [5]}, "group 0 of the state"),
        (lambda state: {**state, "param_groups": []}, r"0 groups.*optimizer has 1"),
        (lambda state: {**state, "param_groups": [{"params": [0]}]}, r"group 0 .*1 parameters.*optimizer.* 6"),
        (lambda state: {**state, "masters": 5}, "'masters'.*int"),
        (lambda state: {**state, "masters": None}, "'masters'.*NoneType"),
        (lambda state: {**state, "masters": [torch.ones(4)]}, "'masters'.*list"),
        (lambda state: {**state, "masters": {"0": torch.ones(4)}}, "'0'"),
        (lambda state: {**state, "masters": {True: torch.ones(4)}}, "True"),
        (lambda state: {**state, "masters": {0: 5}}, "parameter 0.*int"),
    ],
)
def test_states_that_are_no_optimizers_are_refused_and_change_nothing(change, text):
    parameters = [torch.nn.Parameter(torch.ones(4).bfloat16()) for _ in range(6)]
    optimizer = MasterWeightOptimizer(torch.optim.Adam(parameters))
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(OptionError, match=text):
        optimizer.load_state_dict(change(copy.deepcopy(before)))
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)


class KeepsAList(torch.optim.SGD):
    def __init__(self, parameters, kept=list, *, steps_it=True):
        super().__init__(parameters, 0.1)
        every = [p for group in self.param_groups for p in group["params"]]
        self.kept = {"named": {f"p{n}": p for n, p in enumerate(every)}} if kept is dict else kept(every)
        self.steps_it = steps_it

    @torch.no_grad()
    def step(self, closure=None):
        if not self.steps_it:
            return super().step(closure)
        for parameter in self.kept["named"].values() if isinstance(self.kept, dict) else self.kept:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad.to(parameter.dtype) * 0.125)


KeepsAList.__module__ = "elsewhere"


@pytest.mark.parametrize("kept", [list, tuple, set, dict])
def test_an_optimizer_that_steps_a_list_of_its_own_is_refused(kept):
    """It updates the 16-bit ones there, and the masters' rounding would be written over that: nothing is trained."""
    low, high = torch.nn.Parameter(torch.ones(2).bfloat16()), torch.nn.Parameter(torch.ones(2))
    optimizer = MasterWeightOptimizer(KeepsAList([low, high], kept))
    low.grad, high.grad = torch.ones_like(low), torch.ones_like(high)
    with pytest.raises(OptionError, match=r"cannot wrap KeepsAList: it steps parameters.*'kept'.*opt_level='O1'"):
        optimizer.step()
    alone = MasterWeightOptimizer(KeepsAList([high], kept))
    alone.step()


@pytest.mark.parametrize("kept", [list, tuple, set, dict])
def test_an_optimizer_may_keep_a_list_that_it_does_not_step(kept):
    low = torch.nn.Parameter(torch.ones(2).bfloat16())
    optimizer = MasterWeightOptimizer(KeepsAList([low], kept, steps_it=False))
    low.grad = torch.ones_like(low)
    optimizer.step()
    assert low.tolist() == [0.8984375, 0.8984375]


def test_the_groups_own_list_may_be_kept():
    weight = torch.nn.Parameter(torch.ones(2).bfloat16())
    optimizer = MasterWeightOptimizer(torch.optim.LBFGS([weight]))
    assert optimizer.optimizer._params is optimizer.optimizer.param_groups[0]["params"]


class TakesABatchSize(torch.optim.SGD):
    """As Sophia's: `step(closure=None, bs=...)`."""

    def step(self, closure=None, bs=1):
        for group in self.param_groups:
            group["lr"] *= bs
        super().step(closure)
        for group in self.param_groups:
            group["lr"] /= bs


@pytest.mark.parametrize("give", [lambda step: step(bs=4), lambda step: step(None, 4)])
def test_arguments_of_the_step_go_to_an_optimizer_that_takes_them(give):
    weight = torch.nn.Parameter(torch.ones(2).bfloat16())
    optimizer = MasterWeightOptimizer(TakesABatchSize([weight], 0.125))
    weight.grad = torch.ones_like(weight)
    give(optimizer.step)
    assert weight.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("give", [lambda step: step(bs=4), lambda step: step(None, 4)])
def test_arguments_that_no_step_takes_are_refused(give):
    weight = torch.nn.Parameter(torch.ones(2).bfloat16())
    optimizer = MasterWeightOptimizer(torch.optim.SGD([weight], 0.125))
    weight.grad = torch.ones_like(weight)
    with pytest.raises(OptionError, match=r"step.. was given (bs=)?4, which SGD does not take"):
        give(optimizer.step)
    assert weight.tolist() == [1.0, 1.0]


def trained(kind, size, **options):
    weight = torch.nn.Parameter(torch.ones(size, size).bfloat16())
    optimizer = MasterWeightOptimizer(kind([weight], lr=0.125, **options))
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("fused", [False, True])
def test_a_state_of_other_shapes_is_refused(fused):
    """A fused step reads past its end."""
    optimizer, other = (trained(torch.optim.Adam, size, fused=fused) for size in (3, 2))
    before = copy.deepcopy(optimizer.state_dict())
    state = other.state_dict()
    del state["masters"]
    with pytest.raises(OptionError, match=r"'exp_avg' of parameter 0 has shape \(2, 2\).*\(3, 3\).*another model's"):
        optimizer.load_state_dict(state)
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("source", [torch.optim.SGD, torch.optim.Adagrad])
def test_a_state_of_another_class_is_refused_and_nothing_is_changed(source):
    optimizer = trained(torch.optim.Adam, 3)
    before = copy.deepcopy(optimizer.state_dict())
    given = trained(source, 3, **({"momentum": 0.9} if source is torch.optim.SGD else {})).state_dict()
    with pytest.raises(OptionError, match=r"another optimizer's"):
        optimizer.load_state_dict(given)
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)


def test_a_damaged_entry_is_refused():
    optimizer = trained(torch.optim.Adam, 3)
    given = copy.deepcopy(optimizer.state_dict())
    given["state"][0] = 5
    with pytest.raises(OptionError, match="the state of parameter 0 is a int, not a dict"):
        optimizer.load_state_dict(given)
