"""What code names, as far as a trace asks for it."""

import copy

import torch
from torch import nn

import fxamp
from fxamp.capture.functions_of import named_in

SCALE = 2.0


class Above:
    def size(self):
        return 1


class Asks(Above):
    def size(self):
        import torch.nn.functional as inner

        from . import __name__ as name

        global SCALE
        for each in ("alpha", "beta"):
            getattr(self, each)
        SCALE = inner.relu(torch.ones(1), inplace=True)
        return scaled(nn, SCALE, name) + super().size() + torch.backends.cudnn.enabled


def scaled(*given):
    return given


def test_what_a_function_names():
    named = named_in(Asks.size.__code__)
    assert set(named.globals) == {"getattr", "SCALE", "torch", "scaled", "nn", "super"}
    assert {"nn", "SCALE"} <= set(named.handed_on) and "torch" not in named.handed_on
    assert {"relu", "ones", "backends", "cudnn", "enabled"} <= named.attributes and "size" in named.supers
    assert set(named.imports) == {(0, "torch.nn.functional"), (1, "")}
    assert {"alpha", "beta"} <= set(named.strings) and "inplace" not in named.strings


def package(classes):
    """As a package that a model uses: each function names the next, so that all can be reached."""
    space = {"__name__": "a_package"}
    for number in range(classes):
        lines = [
            f"    def method{each}(self): return Kind{number + 1}().method{each}(), self.a{each}" for each in range(4)
        ]
        exec(compile("\n".join([f"class Kind{number}:", *lines]), f"a_package_{number}.py", "exec"), space)
    exec(f"class Kind{classes}:\n    scale = 2.0", space)
    return space


class Uses(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.fc = kind, nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(x) * (1.0 if hasattr(self.kind, "method0") else 2.0)


def test_code_is_read_once():
    model, x = Uses(package(600)["Kind0"]()), torch.randn(2, 4)
    before = named_in.cache_info().misses
    fxamp.convert(copy.deepcopy(model), torch.bfloat16, capture="symbolic")(x)  # a chain longer than Python's stack
    first = named_in.cache_info().misses - before
    fxamp.convert(model, torch.bfloat16, capture="symbolic")(x)
    assert first > 600 and named_in.cache_info().misses == before + first
