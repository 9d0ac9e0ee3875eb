"""What padding a GEMM gains and what its pads and slices cost: in bytes that memory could move meanwhile."""

import dataclasses
import math

from torch import fx

from fxamp import ir
from fxamp.passes.costs import LAUNCH_BYTES
from fxamp.passes.gemm_types import Gemm, GemmDim
from fxamp.passes.padding_flow import Flow, Plan, Planned, fits, is_cast_of_part, reads_as_it_is, results_of
from fxamp.passes.padding_values import is_parameter
from fxamp.passes.recurrent_gemms import Recurrent

# Multiplications and additions a Tensor Core does while memory moves one byte: below it a GEMM waits for memory.
# H100 SXM: 989 TFLOP/s (bf16, dense) over 3.35 TB/s, NVIDIA H100 data sheet. (A100: 156; V100: 140, section 4.2
# of NVIDIA's Train with Mixed Precision.) The highest balance pads the fewest GEMMs.
FLOPS_PER_BYTE = 295
# How many times longer a GEMM takes when rows of its operands do not start at multiples of 16 bytes. Of odd sizes a
# product takes 4.6 to 6.5 times as long on an H100 (bf16, 8192 x 1023 to 8192 x 4095; `tools/gpu_padding` prints it);
# Netflix saw 3 ("Scaling LLM post-training at Netflix", February 2026). Multiples of 2 take 2.8 times as long (BERT's
# head of 30522 words, from the GEMM time of `tools/gpu_speed`), convolutions next to no longer.
ODD_SLOWDOWN = 4
UNALIGNED_SLOWDOWN = 2
_PRODUCTS = frozenset({"linear", "matmul", "mm", "bmm", "addmm", "baddbmm"})
# Elements of fp16 or bf16 in 16 bytes, which is what one load of an operand moves.
VECTOR = 8
# Backward runs two GEMMs of the same size for every GEMM of forward.
GEMMS_PER_STEP = 3
# What the host pays for each kernel of a pad or slice, in bytes that memory moves meanwhile: 40 us, autograd's part of
# it included (0.3 to 0.4 ms for the 7 to 9 of one padded linear, on the host of that H100), at 3.35 TB/s. A small model
# waits for its host and not for its GEMMs, and `auto` must not make it slower; a recorded graph pays none of it.
HOST_BYTES = 128 << 20


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether padding pays, and the figures."""

    pays: bool
    text: str


def is_worth_a_look(gemm: Gemm) -> str:
    """Why padding this GEMM cannot pay, from its sizes alone; "" when it may."""
    if ir.mark(gemm.node).op == "scaled_dot_product_attention":
        return "flash attention pads a head size itself"
    if all(dim.size % VECTOR == 0 for dim in gemm.dims):
        return f"every dimension is a multiple of {VECTOR} already, and more does not pay"
    flops = 2 * gemm.macs
    if flops < FLOPS_PER_BYTE * LAUNCH_BYTES:
        return f"too small: {_short(flops)} FLOP take less time than launching a kernel"
    if flops < FLOPS_PER_BYTE * gemm.nbytes:
        return f"memory-bound: {flops // gemm.nbytes} FLOP a byte, Tensor Cores want {FLOPS_PER_BYTE}"
    return ""


def should_pad(planned: Planned, plan: Plan, flow: Flow) -> Verdict:
    """Whether a GEMM gains more than its pads and slices cost, in the flow of a whole plan."""
    gain, cost = _gain(planned), _cost(planned, plan, flow)
    figures = f"saves about {_short(max(gain, 0))}B worth of time for {_short(cost)}B of pads and slices"
    return Verdict(gain > cost, figures)


def _gain(planned: Planned) -> int:
    gemm = planned.gemm
    growth = math.prod(dim.size + extra for dim, extra in zip(gemm.dims, planned.extras, strict=True))
    aligned = 2 * gemm.macs * growth // math.prod(dim.size for dim in gemm.dims)
    saved = (_slowdown(gemm) * 2 * gemm.macs - aligned) // FLOPS_PER_BYTE
    return saved * (GEMMS_PER_STEP if ir.has_gradient(gemm.node) else 1)


def _slowdown(gemm: Gemm) -> int:
    is_product = ir.mark(gemm.node).op in _PRODUCTS
    return ODD_SLOWDOWN if is_product and any(dim.size % 2 for dim in gemm.dims) else UNALIGNED_SLOWDOWN


def _cost(planned: Planned, plan: Plan, flow: Flow) -> int:
    node, total = planned.gemm.node, 0
    for operand in ir.arguments(node):
        wants = planned.wants(operand.position, operand.keyword)
        padding = flow.paddings.get(operand.value)
        arrives = padding is not None and fits(planned, operand, padding)
        if wants and not (arrives and len(wants) == 1):
            total += _weight_cost(operand.value, wants) if _grows(operand.value, plan) else _copy_cost(operand.value)
    if isinstance(planned.gemm, Recurrent):
        total += sum(3 * HOST_BYTES for _ in planned.gemm.growths(planned.extras))
    for value in carried(node, flow):
        sliced = [user for user in value.users if not reads_as_it_is(value, user, flow, plan)]
        if any(not is_cast_of_part(value, user, flow) for user in sliced):
            total += _copy_cost(value)
        elif sliced and ir.has_gradient(value):
            total += HOST_BYTES  # the zeros behind the gradient
        how = flow.kept.get(value)
        total += 2 * sum(map(_copy_cost, value.all_input_nodes[1:])) if how is not None and how.with_stats else 0
        total += 6 * HOST_BYTES if how is not None and how.with_stats else 0
    return total


def carried(node: fx.Node, flow: Flow) -> list[fx.Node]:
    """The GEMM's padded result, and what it becomes on its way."""
    found, stack = [], results_of(node, flow)
    while stack:
        value = stack.pop()
        if value not in found:
            found.append(value)
            stack += [user for user in value.users if user in flow.kept]
    return found


def _copy_cost(value: fx.Node) -> int:
    """A pad or slice: one kernel that reads and writes the value, and another in backward."""
    shape = ir.shape_of(value) or ()
    once = HOST_BYTES + 4 * math.prod(shape)
    return 2 * once if ir.has_gradient(value) or is_parameter(value) else once


def _grows(value: fx.Node, plan: Plan) -> bool:
    """Whether a weight is padded while it is cast: only padded GEMMs read it."""
    return ir.mark(value).role == "weight cast" and all(user in plan for user in value.users)


def _weight_cost(value: fx.Node, wants: dict[int, int]) -> int:
    """Rows ride on the copy of the bucket; a weight that grows otherwise is copied, filled and converted back alone."""
    return 0 if set(wants) == {0} else 3 * HOST_BYTES


def _short(number: int) -> str:
    for unit in ("", "k", "M", "G"):
        if number < 1000:
            return f"{number:.0f} {unit}"
        number //= 1000
    return f"{number} T"


def padded_size(size: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is at least `size`.

    padded_size(50257, 8) == 50264
    """
    return -(-size // multiple) * multiple


def extra_of(dim: GemmDim, multiple: int) -> int:
    """Elements that align one dimension."""
    return padded_size(dim.size, multiple) - dim.size
