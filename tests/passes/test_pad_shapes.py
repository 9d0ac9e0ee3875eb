"""Every GEMM that runs in low precision, forward and backward, has aligned sizes, or the report gives the reason."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._inductor.fx_passes import pad_mm

from fxamp import ir
from tests.passes.pad_models import (
    Attention,
    Bilinear,
    Einsum,
    Flash,
    Gemms,
    Head,
    HeadAndLogits,
    Residual,
    Unet,
    mlp,
    numbers,
    step,
    words,
)

ZOO = {
    "mlp-1023": (lambda: mlp(15, 1023, 1023, 9), lambda: (numbers(5, 15),)),
    "residual-17": (lambda: Residual(17), lambda: (numbers(3, 3, 8, 8),)),
    "residual-33": (lambda: Residual(33), lambda: (numbers(3, 3, 8, 8),)),
    "unet": (Unet, lambda: (numbers(3, 3, 8, 8),)),
    "conv1d": (
        lambda: nn.Sequential(nn.Conv1d(3, 7, 3), nn.ReLU(), nn.ConvTranspose1d(7, 5, 3), nn.Conv1d(5, 2, 1)),
        lambda: (numbers(3, 3, 20),),
    ),
    "conv3d": (
        lambda: nn.Sequential(nn.Conv3d(3, 5, 2), nn.ReLU(), nn.Conv3d(5, 2, 1), nn.ConvTranspose3d(2, 3, 2)),
        lambda: (numbers(1, 3, 4, 4, 4),),
    ),
    "attention-129": (Attention, lambda: (numbers(1, 129, 30),)),
    "flash-129": (Flash, lambda: (numbers(1, 129, 30),)),
    "bilinear": (Bilinear, lambda: (numbers(5, 12),)),
    "einsum": (Einsum, lambda: (numbers(1, 3, 13),)),
    "head-1009": (Head, lambda: (words(1009, 1, 7), words(1009, 1, 7))),
    "head-50257": (lambda: HeadAndLogits(50257, 12), lambda: (words(50257, 1, 5), words(50257, 1, 5))),
}


@pytest.mark.parametrize("name", ZOO)
def test_every_gemm_that_runs_is_aligned_or_has_a_reason(name):
    make, inputs = ZOO[name]
    with Gemms() as gemms:
        run = step(make(), *inputs())
    assert gemms.seen
    notes = [ir.mark(node).pad for node in run.graph.nodes if ir.mark(node).pad is not None]
    named = {(note.text, size) for note in notes for _, size, padded in note.dims if size == padded and size % 8}
    given = {size for text, size in named if f"= {size} is known only at run time" in text}
    given |= {note.rows for note in notes}  # M: what the advice is about
    unaligned = {(op, size) for op, size in gemms.seen if size % 8 and size not in given}
    assert not unaligned, [note.text for note in notes]


@pytest.mark.parametrize("name", ["mlp-1023", "attention-129", "head-50257"])
@pytest.mark.parametrize("pad_to", [0, 8])
def test_inductor_finds_nothing_left_to_pad(name, pad_to):
    """K and N of every product that runs, asked of Inductor's own pass (on CUDA it pads at each call)."""
    make, inputs = ZOO[name]
    with Gemms() as gemms:
        run = step(make(), *inputs(), pad_to=pad_to)
    rows = {ir.mark(node).pad.rows for node in run.graph.nodes if ir.mark(node).pad is not None}
    alignment = pad_mm.get_alignment_size_dtype(torch.bfloat16)
    sizes = {size for op, size in gemms.seen if op in ("mm", "addmm", "bmm") and size not in (*rows, 129)}
    assert any(pad_mm.get_padded_length(size, alignment) for size in sizes) == (pad_to == 0)


def test_the_recorder_sees_what_is_not_padded():
    with Gemms() as gemms:
        step(mlp(15, 33, 9), numbers(5, 15), pad_to=0)
    assert {size for _, size in gemms.seen} == {5, 9, 15, 33}


def test_the_last_dimension_of_attention_is_padded_and_its_scale_stays():
    graph = step(Flash(), numbers(1, 9, 30)).graph
    flash = next(node for node in graph.nodes if ir.mark(node).op == "scaled_dot_product_attention")
    assert flash.kwargs["scale"] == pytest.approx(6**-0.5)
    assert [ir.mark(value).type.shape[-1] for value in flash.all_input_nodes] == [8, 8, 8]


def test_the_gpu_script_runs_dry():
    script = Path(__file__).parents[2] / "tools" / "gpu_padding"
    ran = subprocess.run([sys.executable, script, "--dry-run"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("results agree") == 7
    assert ran.stdout.endswith("dry run: no CUDA device was used and nothing was timed\n")


def test_the_gpu_script_goes_on_after_a_row_that_fails(capsys, monkeypatch):
    """Time on a GPU is short: the other rows are measured all the same."""
    main = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "gpu_padding"))["main"]
    check = main.__globals__["check"]

    def fails(model, x, dtype):
        if isinstance(model[0] if isinstance(model, nn.Sequential) else model, nn.Linear):
            raise AssertionError("Tensor-likes are not close!\nand more")
        check(model, x, dtype)

    monkeypatch.setitem(main.__globals__, "check", fails)
    monkeypatch.setattr(sys, "argv", ["gpu_padding", "--dry-run"])
    with pytest.raises(SystemExit, match="failed: linear 63, mlp 63"):
        main()
    printed = capsys.readouterr().out
    assert printed.count("results agree") == 5
    assert "linear 63    FAILED: AssertionError: Tensor-likes are not close!\n" in printed
