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
from fxamp.numerics.run import Call, Runner, call_of, state_kept

_PREFIX = "fxamp::"
# Names of GEMM kernels that run on Tensor Cores: cuBLAS, cuDNN, CUTLASS and Triton spell the instruction or the
# accumulation into their kernels' names.
_TENSOR_CORE = re.compile(r"(16816|1688|884|hmma|h?gmma|tensorop|s161616|bf16_s|f16_s|xmma|mma_|sm90_|nvjet)")
_GEMM = re.compile(r"(gemm|conv|cutlass|cublas|wgrad|dgrad|implicit|flash|fmha|attention|nvjet|matmul|xmma)")
_FP32_GEMM = re.compile(r"(sgemm|ffma|simt)")


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

    Raises:
        OptionError: there is no GPU, or the model is not on it; the message says what it would need.
    """
    if not torch.cuda.is_available():
        raise OptionError(
            "fxamp.kernels times GPU kernels with torch.profiler, and this torch sees no CUDA device. Move model and "
            "inputs to a GPU of compute capability 7.0 or later; on a CPU there are no Tensor Cores."
        )
    call = call_of(converted, inputs)
    if not any(parameter.is_cuda for parameter in converted.parameters()):
        raise OptionError("the model is on the CPU: model.cuda() first, and give inputs on the same device.")
    return _timed(call, repeats)


def _timed(call: Call, repeats: int) -> Kernels:
    from torch.profiler import ProfilerActivity, profile

    runner = _NamingRunner(call.model, call.variant, lambda node, value: value)
    with state_kept(call.model), torch.no_grad():
        runner.run(*call.inputs)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            for _ in range(repeats):
                runner.run(*call.inputs)
            torch.cuda.synchronize()
    nodes = {node.name: node for node in call.variant.graph.nodes}
    return Kernels(torch.cuda.get_device_name(), tuple(summed(_kernel_times(profiled.events()), nodes, repeats)))


class _NamingRunner(Runner):
    """Each node in a profiler region of its name."""

    def run_node(self, n: fx.Node) -> Any:
        with torch.profiler.record_function(_PREFIX + n.name):
            return super().run_node(n)


def _kernel_times(events: Iterable[Any]) -> list[tuple[str, str, float]]:
    """(node, kernel, microseconds) of every kernel, by the innermost region of ours that launched it."""
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
    if not _GEMM.search(name):
        return "other"
    return "tensor core gemm" if _TENSOR_CORE.search(name) and not _FP32_GEMM.search(name) else "other gemm"
