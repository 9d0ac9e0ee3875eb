"""What a user may get wrong in the runtime's public surface: each is refused by name, with a remedy."""

import collections
import math
import types

import numpy as np
import pytest
import torch

import fxamp
from fxamp.errors import FxampError, OptionError
from fxamp.runtime import apex as amp
from fxamp.runtime.masters import set_master

HUGE = 10**400  # an int that no float holds


@pytest.fixture(autouse=True)
def without_session():
    amp._amp_state.session = amp.casting.low = None
    yield
    amp._amp_state.session = amp.casting.low = None


def model_and_optimizer():
    model = torch.nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def scaled(**options):
    """A scaler, and an optimizer with scaled gradients."""
    model, optimizer = model_and_optimizer()
    scaler = fxamp.LossScaler(8.0, **options)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    return scaler, optimizer


def initialize(**options):
    model, optimizer = model_and_optimizer()
    return amp.initialize(model, optimizer, verbosity=0, **options)


def scale_loss(**options):
    model, optimizer = initialize()
    with amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer, **options) as loss:
        loss.backward()


def state_with(**changes):
    return {**fxamp.StaticLossScaler(8.0).state_dict(), **changes}


WRONG = {
    "enabled_text": (lambda: fxamp.LossScaler(enabled="no"), "enabled='no' must be True or False"),
    "enabled_tensor": (lambda: fxamp.LossScaler(enabled=torch.ones(3)), "enabled=tensor.* must be True or False"),
    "device_name": (lambda: fxamp.LossScaler(device="cdua"), r"device='cdua' is no device.*Did you mean 'cuda'"),
    "device_number": (lambda: fxamp.LossScaler(device=1.5), r"device=1.5 is no device"),
    "device_nonsense": (lambda: fxamp.StaticLossScaler(2.0, device="nonsense"), "device='nonsense' is no device"),
    "process_group": (lambda: fxamp.LossScaler(process_group=5), "process_group is a int.*new_group"),
    "process_group_world": (lambda: fxamp.LossScaler(process_group=[0, 1]), "process_group is a list"),
    "init_scale_huge": (lambda: fxamp.LossScaler(HUGE), "init_scale=1000.* must be finite"),
    "factor_huge": (lambda: fxamp.LossScaler(growth_factor=HUGE), "growth_factor=1000"),
    "bound_huge": (lambda: fxamp.LossScaler(max_scale=HUGE), "max_scale=1000"),
    "hysteresis_huge": (lambda: fxamp.LossScaler(hysteresis=2**31), r"hysteresis=2147483648.*integer"),
    "static_bounds": (lambda: fxamp.StaticLossScaler(2.0, min_scale=1.0), "min_scale is no option of StaticLossScaler"),
    "static_growth": (lambda: fxamp.StaticLossScaler(2.0, growth_factor=2.0), "growth_factor is no option"),
    "static_typo": (lambda: fxamp.StaticLossScaler(2.0, enable=True), "enable is no option.*Did you mean 'enabled'"),
    "static_state": (
        lambda: fxamp.StaticLossScaler(2.0).load_state_dict(state_with(min_scale=torch.ones(3))),
        "min_sc",
    ),
    "for_typo": (lambda: fxamp.scaler_for("fp16", max_skip=3), "max_skip is no option.*Did you mean 'max_skips'"),
    "for_typo_unused": (
        lambda: fxamp.scaler_for("bf16", max_skip=3),
        "max_skip is no option.*Did you mean 'max_skips'",
    ),
    "names_of_number": (lambda: fxamp.LossScaler().name_parameters(5), r"name_parameters\(\) takes a .*Module.*int"),
    "names_of_parameters": (lambda: fxamp.LossScaler().name_parameters([]), r"name_parameters\(\).*list"),
    "device_huge": (lambda: fxamp.LossScaler(device=HUGE), "device=1000.* is no device"),
    "random_flag": (lambda: fxamp.load_checkpoint("no.pt", restores_random="no"), "restores_random='no' must be True"),
    "apex_overrides_tensor": (lambda: initialize(overrides=torch.ones(3)), "overrides=tensor"),
    "scale_dict": (lambda: fxamp.LossScaler().scale({"loss": torch.ones(())}), r"scale\(\) was given a dict.*values"),
    "scale_text": (lambda: fxamp.LossScaler().scale("loss"), r"scale\(\) was given a str"),
    "scale_set": (lambda: fxamp.LossScaler().scale({torch.ones(())}), r"scale\(\) was given a set"),
    "step_number": (lambda: step(1.0), r"step\(\) of SGD.*1\.0.*max_grad_norm="),
    "step_typo": (lambda: step(max_norm=1.0), r"max_norm.*Did you mean 'max_grad_norm'"),
    "step_no_closure": (lambda: without_closure(fxamp.LossScaler(8.0)), "LBFGS.*closure="),
    "step_no_closure_no_op": (lambda: without_closure(fxamp.NoOpLossScaler()), "LBFGS.*closure="),
    "masters_no_closure": (lambda: fxamp.MasterWeightOptimizer(lbfgs(torch.bfloat16)).step(), "LBFGS.*closure="),
    "graph_no_closure": (
        lambda: fxamp.GraphedStep(torch.nn.Linear(2, 2), torch.nn.functional.mse_loss, lbfgs()),
        "LBFGS.*closure",
    ),
    "graph_loss_of_many": (lambda: graphed(lambda y, _: y), r"loss_fn returned a tensor of shape \(4, 2\).*\.mean"),
    "graph_loss_complex": (lambda: graphed(lambda y, _: y.sum() * 1j), "loss_fn returned .*complex64"),
    "graph_loss_detached": (lambda: graphed(lambda y, _: y.sum().detach()), "loss_fn returned .*needs no gradient"),
    "graph_loss_pair": (lambda: graphed(lambda y, _: (y.sum(), y)), "loss_fn returned a tuple"),
    "graph_no_loss": (lambda: graphed(lambda y, _: None), "loss_fn returned a NoneType"),
    "masters_no_group": (lambda: mastered().add_param_group(None), r"add_param_group\(\) got None; it takes a dict"),
    "masters_empty_group": (lambda: mastered().add_param_group({}), "got a dict with nothing; it takes"),
    "masters_group_typo": (lambda: mastered().add_param_group({"param": []}), "got a dict with 'param'; it takes"),
    "complex_half": (lambda: unscaled(torch.complex32), "0.*have complex32 gradients.*keep the parameters complex64"),
    "step_norm_huge": (lambda: step(max_grad_norm=HUGE), "max_grad_norm=1000.* number >= 0"),
    "choose_bools": (lambda: fxamp.choose_scale(torch.tensor([True])), "max_abs_grad.*torch.bool"),
    "choose_meta": (lambda: fxamp.choose_scale(torch.ones(3, device="meta")), "max_abs_grad is a .* on meta.*dense"),
    "choose_compressed": (
        lambda: fxamp.choose_scale(torch.eye(2).to_sparse_csr()),
        "max_abs_grad is a torch.float32 torch.sparse_csr",
    ),
    "scale_array": (lambda: fxamp.LossScaler().scale(torch.ones(3).numpy()), "given numpy's ndarray"),
    "scale_dict_inside": (lambda: fxamp.LossScaler().scale([torch.ones(()), {"loss": 1}]), "given a dict"),
    "scale_named": (lambda: fxamp.LossScaler().scale(Losses(torch.ones(()), torch.ones(()))), "given a Losses"),
    "step_nobody": (lambda: stepped(types.SimpleNamespace(param_groups=[])), "takes an optimizer"),
    "choose_huge": (lambda: fxamp.choose_scale(HUGE), "max_abs_grad=1000"),
    "master_of_text": (lambda: set_master("weight", torch.ones(2)), r"set_master\(\).*str"),
    "master_number": (lambda: set_master(torch.nn.Parameter(torch.ones(2)), 5), r"set_master\(\).*int"),
    "apex_unknown": (lambda: initialize(nonsense=3), "nonsense is no option of initialize"),
    "apex_typo": (lambda: initialize(optlevel="O1"), "optlevel is no option.*Did you mean 'opt_level'"),
    "apex_typo_convert": (lambda: initialize(boundary=()), "boundary is no option.*Did you mean 'boundaries'"),
    "apex_level": (lambda: initialize(opt_level=["O1"]), "opt_level="),
    "apex_enabled": (lambda: initialize(enabled="no"), "enabled='no' must be True or False"),
    "apex_verbosity": (lambda: initialize_with_verbosity(torch.ones(3)), "verbosity="),
    "apex_scale": (lambda: initialize(loss_scale=HUGE), "loss_scale=1000"),
    "apex_overrides": (lambda: initialize(overrides=5), "overrides=5"),
    "apex_convert": (lambda: initialize(convert=5), "convert=5.*called"),
    "apex_convert_alone": (lambda: initialize(convert=lambda model: model), "convert=.*dtype=.*unexpected.*options"),
    "apex_delay": (lambda: scale_loss(delay_unscale="yes"), "delay_unscale='yes' must be True or False"),
    "apex_delay_check": (lambda: scale_loss(delay_overflow_check=torch.ones(3)), "delay_overflow_check="),
    "apex_scale_zero": (lambda: initialize(loss_scale=0), "loss_scale=0.0 must be finite and > 0"),
    "apex_lbfgs": (lambda: amp.initialize(torch.nn.Linear(2, 2), lbfgs()), "LBFGS.*needs a closure"),
    "apex_state_inf": (lambda: load_apex({"loss_scale": 1.0, "unskipped": math.inf}), "loss_scaler0.*unskipped"),
    "apex_state_tensor": (lambda: load_apex(torch.ones(3)), "loss_scaler0"),
}


Losses = collections.namedtuple("Losses", "real fake")


def stepped(optimizer):
    scaler = fxamp.LossScaler()
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)


def graphed(loss_fn):
    model = torch.nn.Linear(3, 2)
    fxamp.GraphedStep(model, loss_fn, torch.optim.SGD(model.parameters(), 0.1), fxamp.LossScaler())(torch.ones(4, 3), 0)


def mastered():
    return fxamp.MasterWeightOptimizer(torch.optim.SGD(torch.nn.Linear(2, 2).half().parameters(), 0.1))


def unscaled(dtype):
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=dtype))
    parameter.grad = torch.zeros_like(parameter)
    scaler = fxamp.LossScaler()
    scaler.scale(torch.ones(()))
    scaler.unscale_(torch.optim.SGD([parameter], 0.1))


def step(*args, **kwargs):
    scaler, optimizer = scaled()
    scaler.step(optimizer, *args, **kwargs)


def lbfgs(dtype=torch.float32):
    return torch.optim.LBFGS([torch.nn.Parameter(torch.ones(2, dtype=dtype))])


def without_closure(scaler):
    optimizer = lbfgs()
    scaler.scale(optimizer.param_groups[0]["params"][0].sum()).backward()
    scaler.step(optimizer)


def initialize_with_verbosity(verbosity):
    return amp.initialize(torch.nn.Linear(2, 2), verbosity=verbosity)


def load_apex(state):
    initialize()
    amp.load_state_dict({"loss_scaler0": state})


@pytest.mark.parametrize("case", WRONG)
def test_is_refused(case):
    call, culprit = WRONG[case]
    with pytest.raises(FxampError, match=culprit):
        call()


def test_a_device_that_this_machine_has_not_is_refused():
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    with pytest.raises(OptionError, match="device='cuda'"):
        fxamp.LossScaler(device="cuda")


@pytest.mark.parametrize("yes", [True, 1])
def test_what_is_a_flag_counts_as_one(yes):
    assert fxamp.LossScaler(enabled=yes).is_enabled()
    assert not fxamp.LossScaler(enabled=not yes).is_enabled()


def test_nothing_is_converted_where_an_option_is_unknown():
    model, optimizer = model_and_optimizer()
    with pytest.raises(OptionError, match="nonsense"):
        amp.initialize(model, optimizer, opt_level="O2", nonsense=3)
    assert model.weight.dtype == torch.float32
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)


def test_a_converter_of_the_users_own_takes_what_it_takes():
    seen = {}

    def convert(model, **options):
        seen.update(options)
        return model

    initialize(convert=convert, anything=3)
    assert seen["anything"] == 3


def test_the_scale_of_sparse_gradients_is_chosen():
    gradient = torch.sparse_coo_tensor([[0, 0]], [0.75, 0.25], (4,))
    assert fxamp.choose_scale(gradient) == fxamp.choose_scale(1.0)


def test_the_scale_of_a_numpy_number_is_chosen():
    assert fxamp.choose_scale(np.float32(0.75)) == fxamp.choose_scale(0.75)


@pytest.mark.parametrize(
    ("given", "meant"),
    [(None, False), (0, False), (torch.tensor(True), True), (np.bool_(True), True), (np.int64(1), True)],
)
def test_flags_of_other_kinds_count(given, meant):
    assert fxamp.LossScaler(enabled=given).is_enabled() == meant


def test_numbers_of_numpy_and_torch_are_numbers():
    scaler = fxamp.LossScaler(np.float32(8.0), torch.tensor(4.0), np.float32(0.25), np.int64(3))
    assert scaler.state_dict() == fxamp.LossScaler(8.0, 4.0, 0.25, 3).state_dict()
    assert {type(value) for value in scaler.state_dict().values()} == {float, int, str, dict}


def test_an_interval_past_an_int32_is_never():
    assert fxamp.LossScaler(growth_interval=10**12).get_growth_interval() == 2**31 - 1
