"""Ctrl-C while a capture switches what is the whole process's: it is as it was afterwards."""

import builtins
import logging
import sys

import pytest
import torch
from torch import nn
from torch.fx import _symbolic_trace
from torch.nn.modules import transformer

from fxamp.capture import attention, creations, surroundings, unseen
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
}


def state():
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch._C._get_cudnn_enabled(),
        torch._C._get_tracing_state(),
        torch.backends.mha.get_fastpath_enabled(),
        logging.getLogger("torch._subclasses.fake_tensor").disabled,
        dict(_symbolic_trace._wrapped_fns_to_patch),
        *({name: id(value) for name, value in vars(space).items()} for space in (torch, torch.random, transformer)),
        builtins.isinstance,
        builtins.callable,
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
