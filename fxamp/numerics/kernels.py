"""Are Tensor Cores used? Time of a converted model's kernels, by node, from torch.profiler."""

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

import torch
from tabulate import tabulate
from torch import fx, nn

from fxamp import ir
from fxamp.errors import OptionError
from fxamp.model.engine import engine_of
from fxamp.model.unconverted import check_left
from fxamp.numerics.kept import state_kept
from fxamp.numerics.losses import floats_in
from fxamp.numerics.run import Call, call_of, run
from fxamp.numerics.runner import Part, Runner

_PREFIX = "fxamp::"
# cuBLAS, cuDNN, CUTLASS, FlashAttention and Triton spell what they do into their kernels' names, from Volta to
# Blackwell: the instruction's shape (884, 1688, 16816), its class (tensorop, hmma, wgmma, umma) or its generator
# (nvjet). Where the names were seen stands beside the table of tests/numerics/test_kernels.py.
_PRODUCT = re.compile(
    r"gemm|gemv|conv(?!ert)|[fdw](prop|grad)|winograd|fft2d|cutlass|cublas|flash|fmha|attention|sdpa|nvjet|matmul|xmma"
    r"|triton_tem|triton_mm|rnn_(block)?persist|persistrnn|grouped_mm|groupmm|[hsi\d]cudnn_"
)
_AROUND = re.compile(
    r"splitkreduce|splitkv_combine|reduce_1block|nchwtonhwc|nhwctonchw|converttensor|scaletensor|scalepackedtensor"
    r"|computeoffsets|computebooffsets|im2col|col2im|vol2col|dot_do_o|convert_dq|generatewinogradtiles|flip_filter"
    r"|transpose_readwrite|elementwise_kernel|elemwise|prepare_|compute_gemm_pointers|triton_(poi|per|red|for|spl|unk)_"
    r"|epilogue::impl::globalkernel|flashattnbwd(pre|post)process|flashattnfwdcombine"
)
"""Kernels that only move or reduce values beside a product; a GEMM's own type may name an "elementwise" epilogue."""
_TENSOR_CORE = re.compile(
    r"[a-z](884|1684|1688|8816|16816|16832|161616)(?!\d)|tensorop|tensor16x8|tensor8x8|(?<![a-z])mma|[hqxw]mma|gmma"
    r"|utcmma|umma|nvjet|flash_(fwd|bwd|fprop|bprop)|(fwd|bwd)_kernel_flash|flashattn|fmha_cutlass[fb]_b?f16"
)
_FP32_MATH = re.compile(r"sgemm|scudnn|ffma|simt|dgemm|zgemm|cgemm|sgemv|winograd(?!.*(hmma|mma))")
_BY_PRECISION = re.compile(r"triton_tem|triton_mm|rnn_(block)?persist|persistrnn")
"""Kernels whose names do not tell: they use Tensor Cores where they are given low operands."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel's time in one node, in microseconds."""

    name: str
    node: str
    source: str
    microseconds: float
    kind: str


@dataclasses.dataclass(frozen=True)
class Kernels:
    """What ran on the GPU; `str()` tells it.

    Attributes:
        tensor_core_share: of the GEMMs' time, 0 to 1; None where there was no GEMM.
        kernels: longest first; kind is "tensor core gemm", "other gemm", "cast" or "other".
    """

    device: str
    kernels: tuple[Kernel, ...]

    @property
    def tensor_core_share(self) -> float | None:
        gemms = [kernel for kernel in self.kernels if kernel.kind.endswith("gemm")]
        total = sum(kernel.microseconds for kernel in gemms)
        return sum(k.microseconds for k in gemms if k.kind == "tensor core gemm") / total if total else None

    def __str__(self) -> str:
        if not self.kernels:
            return (
                f"{self.device}: no kernel was recorded. Was the model converted? Does another profiler hold the GPU?"
            )
        share = self.tensor_core_share
        head = f"{self.device}: " + ("no GEMM ran" if share is None else f"{share:.1%} of GEMM time in Tensor Cores")
        rows = [
            (f"{kernel.microseconds:.0f}", kernel.kind, kernel.node, kernel.source.rpartition("/")[2], kernel.name[:60])
            for kernel in self.kernels[:20]
        ]
        return head + "\n" + tabulate(rows, headers=("us", "kind", "node", "line", "kernel"), disable_numparse=True)


def kernels(converted: nn.Module, inputs: Any, repeats: int = 3) -> Kernels:
    """Time the kernels of one forward by node.

        print(fxamp.kernels(model, (x,)))

    Args:
        inputs: of one call, on the model's CUDA device.
        repeats: forwards that are averaged, after one that is not.

    Returns:
        Each kernel with its node and microseconds a forward, the longest first, and the Tensor Cores' share of the
        GEMMs' time; `str()` tells both.

    Raises:
        OptionError: there is no GPU, or the model is not on it; the message says what it would need.
    """
    if not torch.cuda.is_available():
        raise OptionError(
            "fxamp.kernels times GPU kernels with torch.profiler, and this torch sees no CUDA device. Move model and "
            "inputs to a GPU of compute capability 7.0 or later; on a CPU there are no Tensor Cores."
        )
    if engine_of(converted) is None:
        check_left(converted, "kernels times nothing")
        return Kernels(torch.cuda.get_device_name(), ())
    call = call_of(converted, inputs)
    tensors = [*converted.parameters(), *converted.buffers(), *floats_in((call.args, call.kwargs))]
    if not any(tensor.is_cuda for tensor in tensors):
        raise OptionError("the model is on the CPU: model.cuda() first, and give inputs on the same device.")
    return _timed(call, repeats)


def _timed(call: Call, repeats: int) -> Kernels:
    from torch.profiler import ProfilerActivity, profile

    nodes: dict[str, fx.Node] = {}

    def note(part: Part, node: fx.Node, value: Any) -> Any:
        nodes[_region(part, node)] = node
        return value

    with state_kept(call.model), torch.set_grad_enabled(call.needs_gradients):
        run(call, note, runner=_NamingRunner)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            for _ in range(repeats):
                run(call, note, runner=_NamingRunner)
            torch.cuda.synchronize()
    return Kernels(torch.cuda.get_device_name(), tuple(summed(_kernel_times(profiled.events()), nodes, repeats)))


def _region(part: Part, node: fx.Node) -> str:
    return f"graph {part.graph}: {node.name}" if part.graph else node.name


class _NamingRunner(Runner):
    """Each node in a profiler region of its name."""

    def run_node(self, n: fx.Node) -> Any:
        with torch.profiler.record_function(_PREFIX + _region(self.part, n)):
            return super().run_node(n)


def _kernel_times(events: Iterable[Any]) -> list[tuple[str, str, float]]:
    """(node, kernel, microseconds) of every kernel, by the innermost region of ours that launched it.

    Kernels hang on the host's op that launched them. The GPU's own events, among them a copy of each region as long
    as all its kernels, have none and so count nothing a second time.
    """
    found = []
    for event in events:
        for kernel in getattr(event, "kernels", ()):
            owner = event
            while owner is not None and not owner.name.startswith(_PREFIX):
                owner = owner.cpu_parent
            name = owner.name.removeprefix(_PREFIX) if owner is not None else ""
            found.append((name, kernel.name, float(kernel.duration)))
    return found


def summed(times: Iterable[tuple[str, str, float]], nodes: dict[str, fx.Node], repeats: int) -> list[Kernel]:
    """Kernels by node and name, mean time of one forward, longest first."""
    totals: dict[tuple[str, str], float] = {}
    for node, kernel, microseconds in times:
        totals[node, kernel] = totals.get((node, kernel), 0.0) + microseconds / repeats
    made = [
        Kernel(
            kernel, node, ir.source_line(nodes[node]) if node in nodes else "", spent, kind_of(kernel, nodes.get(node))
        )
        for (node, kernel), spent in totals.items()
    ]
    return sorted(made, key=lambda found: -found.microseconds)


def kind_of(kernel: str, node: fx.Node | None) -> str:
    """What a kernel does, told by the node it runs for and by its name."""
    if node is not None and ir.mark(node).role in ("cast", "weight cast"):
        return "cast"
    name = kernel.lower()
    if _AROUND.search(name) or not _PRODUCT.search(name):
        return "other"
    if _BY_PRECISION.search(name):
        return "tensor core gemm" if node is not None and ir.mark(node).precision == "low" else "other gemm"
    return "tensor core gemm" if _TENSOR_CORE.search(name) and not _FP32_MATH.search(name) else "other gemm"
