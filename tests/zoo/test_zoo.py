"""Every model of the zoo against torch.autocast: accuracy, share of low GEMMs, modes, buffers, state."""

import importlib
import math

import pytest
import torch

from tests.zoo import measure

HAND_WRITTEN = (
    "resnet50", "resnext", "se_resnext", "vgg_ssd", "unet", "bert", "transformer", "gnmt", "ncf", "tacotron2",
    "waveglow", "jasper", "conv_seq2seq", "mlstm", "big_lstm",
)  # fmt: skip
# Two roundings of the same numbers never differ by less than this: a distance below it is none.
NOTHING = 1e-6


def check(row: measure.Row, further: float = 2) -> None:
    """What every model owes; `further` from fp32 than autocast is too far."""
    for what in ("outputs", "gradients", "evaluated", "buffers"):
        ours, theirs = row.error(row.ours, what), row.error(row.auto, what)
        assert ours <= further * theirs + NOTHING, (
            f"{row.name}: {what} are {ours:.2e} from fp32, autocast's {theirs:.2e}"
        )
    assert row.ours.share >= row.auto.share, f"{row.ours.low}/{row.ours.gemms}, {row.auto.low}/{row.auto.gemms}"
    assert row.ours.low > 0
    assert all(map(math.isfinite, row.ours.losses))
    check_gradients(row)
    check_buffers(row)


def check_gradients(row: measure.Row) -> None:
    """The same parameters have a gradient, in their own dtype."""
    for name, theirs in row.full.gradients.items():
        ours = row.ours.gradients[name]
        assert (ours is None) == (theirs is None), name
        assert ours is None or ours.dtype == theirs.dtype, name


def check_buffers(row: measure.Row) -> None:
    """Whole numbers are equal; floating ones are compared with autocast's distance above."""
    for name, theirs in row.full.buffers.items():
        ours = row.ours.buffers[name]
        assert ours.dtype == theirs.dtype, name
        assert theirs.is_floating_point() or torch.equal(ours, theirs), name


def check_eval_is_deterministic(row: measure.Row, call: measure.Call) -> None:
    row.converted.eval()
    args, kwargs = call
    with torch.no_grad():
        first, second = (measure.tensors(row.converted(*args, **kwargs)) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_hand_written(name):
    module = importlib.import_module(f"tests.zoo.{name}")
    torch.manual_seed(1)
    call = (module.inputs(), {})
    row = measure.measure(name, module.make, call, capture="symbolic")
    assert row.capture == "symbolic"
    check(row)
    check_eval_is_deterministic(row, call)


def test_the_measure_can_fail():
    """A model that is far from fp32, and one that stays in fp32, are both caught."""
    module = importlib.import_module("tests.zoo.ncf")
    torch.manual_seed(1)
    call = (module.inputs(), {})
    high = measure.measure("ncf", module.make, call, overrides={"*": "deny"})
    with pytest.raises(AssertionError, match=r"0/9, 9/9"):
        check(high)
    far = measure.measure("ncf", module.make, call)
    far.ours.outputs = [value + 1 for value in far.ours.outputs]
    with pytest.raises(AssertionError, match="outputs are"):
        check(far)
    moved = measure.measure("unet", importlib.import_module("tests.zoo.unet").make, (_image(), {}))
    moved.ours.buffers["downs.0.0.1.num_batches_tracked"] += 1
    with pytest.raises(AssertionError, match="num_batches_tracked"):
        check(moved)


def _image() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    return importlib.import_module("tests.zoo.unet").inputs()
