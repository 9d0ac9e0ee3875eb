"""Why no parameter of an optimizer has a gradient, as far as the loss that was scaled last tells."""

import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from fxamp.dtypes import dtype_name
from fxamp.runtime import gradients

Loss = weakref.ref[torch.Tensor] | None


def loss_in(outputs: Any) -> Loss:
    """The first of what is to be scaled, a tensor or a (nested) list of tensors, that requires grad; not kept alive."""
    first = next((each for each in _tensors(outputs) if each.requires_grad), None)
    return None if first is None else weakref.ref(first)


def leaves_of(loss: Loss) -> list[torch.Tensor]:
    """The leaf tensors that backward() would reach; none where the loss is gone."""
    tensor = None if loss is None else loss()
    found, seen = [], set()
    nodes = [] if tensor is None or tensor.grad_fn is None else [tensor.grad_fn]
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            leaf = getattr(node, "variable", None)  # of AccumulateGrad, or what a function's author has kept
            found += [leaf] if isinstance(leaf, torch.Tensor) and leaf.is_leaf else []
            nodes += [following for following, _ in node.next_functions if following is not None]
    return found


def why_none(optimizer: torch.optim.Optimizer, had_history: bool | None, loss: Loss) -> str:
    """The cause in a sentence, with the counts that tell, and the likely remedy.

    Args:
        had_history: whether the loss that was scaled last required grad; None if none was scaled.
        loss: it, if it is there still.
    """
    every = list(gradients.parameters(optimizer))
    trainable = [parameter for parameter in every if parameter.requires_grad]
    counts = f"{len(every)} parameters, {len(trainable)} of them require grad, 0 have .grad"
    if not trainable:
        return f"{counts}: all parameters are frozen; set requires_grad_(True) on those to train."
    if not all(parameter.is_leaf for parameter in trainable):
        return (
            f"{counts}, and some are not leaves: the optimizer holds copies that were moved or cast "
            "(model.to() of a tensor, not of a module); build the optimizer from model.parameters() "
            "after moving the model."
        )
    if had_history is None:
        return (
            f"{counts}, and no loss was scaled: backward() never reached them. Either the loss was detached "
            "(.item(), .detach(), torch.no_grad()), or the optimizer holds parameters of another model (one "
            "that was replaced, copied or re-created after the optimizer was built)."
        )
    if not had_history:
        return (
            f"{counts}, and the loss that was scaled last does not require grad: it was detached (.item(), "
            ".detach(), torch.no_grad()), or nothing that was trained went into it."
        )
    return f"{counts}, although the loss that was scaled last requires grad: {_of_others(trainable, leaves_of(loss))}"


def _of_others(trainable: list[torch.Tensor], leaves: list[torch.Tensor]) -> str:
    remedy = "Build it from model.parameters() of the model that gives the loss"
    if not leaves:
        return (
            "backward() was not called since zero_grad(), or the optimizer holds parameters of another model: one that "
            f"was replaced, copied, re-created, or moved with new parameters, after the optimizer was built. {remedy}."
        )
    if not {id(parameter) for parameter in trainable}.isdisjoint(map(id, leaves)):
        return (
            "it hangs on these parameters, so backward() was not called since zero_grad(), or reached the parameters "
            "through torch.autograd.grad(), which gives gradients back and sets none."
        )
    shapes = Counter(tuple(parameter.shape) for parameter in trainable)
    alike = [leaf for leaf in leaves if tuple(leaf.shape) in shapes]
    if shapes - Counter(tuple(leaf.shape) for leaf in alike):
        return (
            "it hangs on none of these parameters, and on no others of their shapes: the optimizer holds parameters of "
            f"another model, or of a part that the loss does not use. {remedy}."
        )
    moved = {_place(leaf) for leaf in alike} - {_place(parameter) for parameter in trainable}
    what = (
        f"was moved or cast with new parameters, which are {' and '.join(sorted(moved))},"
        if moved
        else ("was copied, re-created, or moved with new parameters,")
    )
    return (
        "it hangs on none of these parameters, but on others of the same shapes: the model "
        f"{what} after the optimizer was built. {remedy}, after it was moved."
    )


def _place(tensor: torch.Tensor) -> str:
    return f"{dtype_name(tensor.dtype)} on {tensor.device}"


def _tensors(outputs: Any) -> Iterator[torch.Tensor]:
    if isinstance(outputs, torch.Tensor):
        yield outputs
    elif isinstance(outputs, list | tuple):
        for each in outputs:
            yield from _tensors(each)
