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
