"""Training steps on fake CUDA tensors: which of them ask the device for a number, without a device. Prints JSON.

A fake tensor has no number to give: `.item()`, `bool()` and their like raise. What is asked of a CPU tensor (the count
of steps of an optimizer, what has arrived on the host) is answered, for it makes nobody wait.
"""

import itertools
import json

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import fxamp
from fxamp.counting import fake_cuda
from fxamp.runtime import apex

aten = torch.ops.aten
COPIES = (aten._to_copy.default, aten.copy_.default)
NO_FAKE = (aten._fused_sgd_.default, aten._fused_adagrad_.default)  # kernels that torch has no fake of


class Host(TorchDispatchMode):
    """Answers what is asked of the CPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is aten._local_scalar_dense.default and args[0].device.type == "cpu":
            return 0.5
        if func in NO_FAKE:
            return None
        result = func(*args, **(kwargs or {}))
        if func in COPIES and result.device.type == "cpu" and not is_asynchronous(func, args, kwargs or {}):
            raise AssertionError(f"{func} waits for the device")
        return result


def is_asynchronous(func, args, kwargs):
    """Whether a copy to the CPU makes nobody wait: it comes from there, or need not be there when the host goes on."""
    source = args[1] if func is aten.copy_.default else args[0]
    return source.device.type == "cpu" or (kwargs.get("non_blocking") or args[2:3] == (True,))


class Event:
    """A CUDA event that has passed."""

    def record(self, stream=None):
        pass

    def query(self):
        return True

    def synchronize(self):
        pass


class Stream:
    """CUDA's only stream."""

    cuda_stream = 0

    def record_event(self):
        return Event()


OPTIMIZERS = {
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "foreach AdamW": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "plain AdamW": lambda parameters: torch.optim.AdamW(parameters, foreach=False),
    "capturable AdamW": lambda parameters: torch.optim.AdamW(parameters, capturable=True),
    "fused SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "foreach SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters),
}
SCALERS = {"LossScaler": fxamp.LossScaler, "hysteresis": lambda: fxamp.LossScaler(hysteresis=2, refill="good_step")}
WAYS = {
    "step": {},
    "clipped": {"max_grad_norm": 1.0},
    "unscaled first": {"unscales": True},
    "accumulated": {"backwards": 3},
}


def trained(make_optimizer, opt_level, scaler, *, unscales=False, backwards=1, **given):
    with torch.device("cuda"):
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.LayerNorm(32), torch.nn.Linear(32, 4))
    x = torch.randn(8, 16, device="cuda")
    model = fxamp.convert(model, dtype=torch.float16, opt_level=opt_level, example_inputs=(x,))
    optimizer = make_optimizer(model.parameters())
    if opt_level == "O2":
        optimizer = fxamp.MasterWeightOptimizer(optimizer)
    for _ in range(4):
        for _ in range(backwards):
            scaler.scale(model(x).square().mean()).backward()
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer, **given)
        scaler.update()
        optimizer.zero_grad()


def trained_by_apex(make_optimizer, opt_level):
    with torch.device("cuda"):
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.LayerNorm(32), torch.nn.Linear(32, 4))
    x = torch.randn(8, 16, device="cuda")
    model, optimizer = apex.initialize(model, make_optimizer(model.parameters()), opt_level=opt_level)
    for _ in range(4):
        with apex.scale_loss(model(x).float().square().mean(), optimizer) as loss:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def clipped_by_hand():
    """It waits: an error is to be raised where the norm is not finite."""
    weight = torch.zeros(4, device="cuda", requires_grad=True)
    weight.sum().backward()
    torch.nn.utils.clip_grad_norm_([weight], 1.0, error_if_nonfinite=True)


def read_as_a_list():
    torch.ones(3, device="cuda").tolist()


def copied_to_the_host():
    torch.ones(3, device="cuda").cpu()


CONTROLS = (clipped_by_hand, read_as_a_list, copied_to_the_host)


def asked(run, *args, **kwargs):
    """What the device was asked for; empty where it was not."""
    try:
        with FakeTensorMode(), Host():
            run(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def cases():
    for name, level in itertools.product(OPTIMIZERS, ("O1", "O2")):
        for scaler, way in itertools.product(SCALERS, WAYS):
            yield (
                f"{name}, {level}, {scaler}, {way}",
                asked(trained, OPTIMIZERS[name], level, SCALERS[scaler](), **WAYS[way]),
            )
    for name, level in itertools.product(("fused AdamW", "foreach SGD"), ("O1", "O2")):
        yield f"{name}, {level}, apex", asked(trained_by_apex, OPTIMIZERS[name], level)
    for control in CONTROLS:
        yield control.__name__, asked(control)


if __name__ == "__main__":
    fake_cuda.install()
    torch.cuda.Event, torch.cuda.current_stream = Event, lambda device=None: Stream()
    print(json.dumps(dict(cases())))
