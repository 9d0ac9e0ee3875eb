"""Checks of data that forward makes, as calls that a graph can hold.

if labels.max() >= classes:         wrong = labels.max() >= classes
    raise ValueError(...)           require(wrong, False, "ValueError", "model.py:13: raise ...")
"""

import builtins
from typing import Any

import torch
from torch import fx


def require(
    answer: torch.Tensor | bool, way_on: bool, error: str, said: str, shown: dict[str, tuple[Any, str]]
) -> None:
    """Raise a builtin error where an answer is not the one with which forward goes on.

    Args:
        shown: values that the text shows, each with its format, by what stands for them in it.
    """
    if bool(answer) is not way_on:
        for mark, (value, how) in shown.items():
            said = said.replace(mark, format(value, how))
        raise getattr(builtins, error)(said)


fx.node.has_side_effect(require)
