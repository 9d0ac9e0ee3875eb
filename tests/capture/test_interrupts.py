"""Ctrl-C while a capture switches what is the whole process's: it is as it was afterwards."""

import builtins
import dataclasses
import importlib
import logging
import os
import random
import sys
from importlib.machinery import SourceFileLoader, SourcelessFileLoader

import pytest
import torch
from torch import nn
from torch._functorch import apis
from torch.autograd import Function
from torch.autograd.function import _SingleLevelFunction
from torch.fx import _symbolic_trace
from torch.nn.modules import transformer
from torch.utils import checkpoint

from fxamp.capture import (
    assignments,
    attention,
    creations,
    drawn,
    functions,
    imports,
    process,
    reads,
    surroundings,
    torch_settings,
    unseen,
    vmapped,
)
from fxamp.capture.traces import State
from fxamp.fakes import quietly
from fxamp.recurrent_fakes import without_cudnn

SWITCHES = {
    "idle_autocast": lambda: surroundings.idle_autocast("cpu"),
    "grad_mode_reads": lambda: surroundings.grad_mode_reads(nn.Module()),
    "honest_questions": surroundings.honest_questions,
    "plain_answers": lambda: surroundings.plain_answers(None),
    "unrepeatable_randomness": surroundings.unrepeatable_randomness,
    "opened_wraps": lambda: surroundings.opened_wraps(lambda name: False),
    "quietly": quietly,
    "plain_paths": attention.plain_paths,
    "traced_sizes": lambda: creations.traced_sizes(None),
    "without_cudnn": lambda: without_cudnn(nn.LSTM(2, 2)),
    "no_jit_trace": unseen.no_jit_trace,
    "training_reads": lambda: surroundings.training_reads(nn.Linear(2, 2), {}),
    "scripted_functions_opened": surroundings.scripted_functions_opened,
    "variables_made": creations.variables_made,
    "drawn_at_each_call": lambda: drawn.drawn_at_each_call(None),
    "whole_functions": lambda: functions.whole_functions(None, None),
    "vmapped_functions": lambda: vmapped.vmapped_functions(None),
    "process_noted": lambda: process.process_noted(None, None),
    "torch_settings_reads": lambda: torch_settings.torch_settings_reads(None, None),
    "assignments": lambda: assignments.Assignments(State(nn.Linear(2, 2)), None).noted(),
    "loads": lambda: imports.Imports().noted(None),
    "reads": lambda: reads.Reads(nn.Linear(2, 2), lambda: True, None, None).noted(),
}

HOLDERS = (
    *(
        torch,
        torch.random,
        torch.backends.cuda,
        torch.distributed,
        torch._functorch.utils,
        apis,
        checkpoint,
        transformer,
    ),
    *(
        torch_settings._PROPERTY,
        nn.Module,
        Function,
        type(Function),
        _SingleLevelFunction,
        torch.jit.ScriptFunction,
        type(torch.autograd.Variable),
    ),
    *(type(os.environ), importlib, SourceFileLoader, SourcelessFileLoader, random, dataclasses, nn.Module),
)


def state():
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch._C._get_cudnn_enabled(),
        torch._C._get_tracing_state(),
        torch.backends.mha.get_fastpath_enabled(),
        logging.getLogger("torch._subclasses.fake_tensor").disabled,
        dict(_symbolic_trace._wrapped_fns_to_patch),
        *({name: id(value) for name, value in vars(holder).items()} for holder in HOLDERS),
        *(builtins.isinstance, builtins.callable, builtins.open),
    )


def entered(switch, lines):
    """Whether a context could be entered before that many of its lines were begun: then Ctrl-C comes."""

    def trace(frame, event, _):
        nonlocal lines
        if not frame.f_code.co_flags & 0x20:  # generators alone: the contexts themselves
            return None
        lines -= event == "line"
        if lines < 0:
            raise KeyboardInterrupt
        return trace

    context, was = switch(), sys.gettrace()
    try:
        sys.settrace(trace)
        context.__enter__()
        sys.settrace(was)
        context.__exit__(None, None, None)
        return True
    except KeyboardInterrupt:
        return False
    finally:
        sys.settrace(was)


@pytest.mark.parametrize("inside_autocast", [False, True])
@pytest.mark.parametrize("switch", SWITCHES.values(), ids=SWITCHES)
def test_what_is_switched_is_switched_back(switch, inside_autocast, monkeypatch):
    monkeypatch.setitem(_symbolic_trace._wrapped_fns_to_patch, (id(globals()), "entered"), globals())
    with torch.autocast("cpu", enabled=inside_autocast):
        before, lines = state(), 0
        while not entered(switch, lines):
            assert state() == before, f"Ctrl-C before line {lines + 1}"
            lines += 1
        assert state() == before and lines > 2
