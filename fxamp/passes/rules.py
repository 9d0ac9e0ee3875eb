"""The rules of what may run low: which nodes are fixed, and why (an analysis, it changes nothing).

1. allow nodes are low, deny and unlisted nodes are high; overrides and the user's own casts and autocast regions
   come before the lists.
2. An infer node downstream of a deny node with no allow node between is high; so is one that reaches a
   domain-sensitive argument (log, rsqrt, a denominator) through infer and clear nodes only.
3. The level says which of the remaining infer nodes may be low at all ("eligible"); in bfloat16, 'balanced' keeps
   residual streams high.
   So does it what leads to a question about positions: an argsort, a threshold, a bin (positions.py), and a softmax
   that a norm centres.
4. What becomes of a parameter or buffer from call to call is high (states.py).
5. Values that low precision would destroy are high: literals out of range and what they taint, exact integers,
   squares.
6. A write that adds to what is there is high (scatter_add, and index_put with accumulate=True).
7. What resamples by weighted means is high: a GPU adds its gradients in their own dtype (resampling.py).
What is left is free, and the cut decides.
"""

import operator
from collections.abc import Callable

import torch
from torch import fx

from fxamp import ir
from fxamp.authors import cast_by_autocast
from fxamp.capability import is_fused_recurrent
from fxamp.dtypes import LOW_DTYPES, dtype_name, is_inexact
from fxamp.fakes import UNKNOWN
from fxamp.ir import Colour, Reason
from fxamp.lists import TRAITS
from fxamp.passes.literals import Fit, is_beyond_range
from fxamp.passes.overrides import override_for, override_inside, protected_part
from fxamp.passes.pin import follow_pin
from fxamp.passes.policy import Policy
from fxamp.passes.positions import protect_positions
from fxamp.passes.reads import Read, asked_dtype, converts_to, is_conversion
from fxamp.passes.resampling import adds_gradients_low
from fxamp.passes.ruling import Ruling, Verdict, start_ruling
from fxamp.passes.spread import (
    keep_differences_of_weights,
    keep_last_sums,
    mark_born,
    protect_differences,
    protect_domains,
    spread_deny,
)
from fxamp.passes.states import protect_states
from fxamp.passes.streams import protect_streams
from fxamp.passes.values import (
    adds_to_what_is_there,
    fix_destroyed_values,
    is_dot_product,
    is_elementwise_product,
    is_rearrangement,
    is_sum_of_squares,
    mark_integers,
    spread_taint,
)
from fxamp.runtime.recurrent_memory import GATES
from fxamp.value_types import tensors_in


def apply_rules(graph: fx.Graph, policy: Policy, fit_of: Callable[[fx.Node], Fit]) -> Ruling:
    """Fix what the rules fix.

    Args:
        graph: typed.
        fit_of: how a parameter's or buffer's numbers fit into the low dtype.
    """
    ruling = start_ruling(graph, policy, fit_of)
    choose_colours(ruling)
    mark_integers(ruling)
    for node in graph.nodes:
        if node in ruling.participants:
            _fix_by_colour(ruling, node)
            follow_pin(ruling, node)
    if not policy.everything_low:
        spread_deny(ruling)
        protect_domains(ruling)
        protect_states(ruling)
        protect_streams(ruling)
        protect_differences(ruling)
        protect_positions(ruling)
        keep_last_sums(ruling)
        keep_differences_of_weights(ruling)
        mark_born(ruling)
    return ruling


# ------------------------------------------------------------------------------------------------- colours


def choose_colours(ruling: Ruling) -> None:
    """Every node's list colour, overrides applied."""
    policy = ruling.policy
    for node in ruling.graph.nodes:
        ruling.colours[node] = _list_colour(policy, ir.mark(node).op)
        key = override_for(node, policy.overrides)
        if key is not None:
            ruling.colours[node] = policy.overrides[key]
            ruling.chosen[node] = Reason("override", f"overrides[{key!r}] = {ruling.colours[node]!r}")
        elif part := protected_part(node, policy):
            ruling.colours[node] = "deny"
            ruling.chosen[node] = Reason("override", f"the model's _keep_in_fp32_modules names {part!r}")
        elif (is_dot_product(node) or adds_to_what_is_there(node)) and not policy.is_users_choice(ir.mark(node).op):
            ruling.colours[node] = "deny"
        elif is_rearrangement(node) and not policy.is_users_choice("einsum"):
            ruling.colours[node] = "clear"
        elif is_elementwise_product(node) and not policy.is_users_choice("einsum"):
            ruling.colours[node] = _list_colour(policy, "mul")


def _list_colour(policy: Policy, op: str) -> Colour:
    if op in ("input", "parameter", "buffer", "output"):
        return "clear"
    colour: Colour = policy.lists.colour(op)
    if policy.level == "strict" and op in TRAITS["strict_deny"] and not policy.is_users_choice(op):
        return "deny"
    return colour


# -------------------------------------------------------------------------------------------- fixed by colour


def _fix_by_colour(ruling: Ruling, node: fx.Node) -> None:
    op, colour = ir.mark(node).op, ruling.colours[node]
    if node.op in ("placeholder", "get_attr"):
        _fix_source(ruling, node)
    elif node in ruling.chosen and colour == "deny":
        ruling.fixed[node] = Verdict("high", ruling.chosen[node])
    elif node.meta.get("boundary"):
        ruling.fix(node, "high", "boundary", "it is converted by itself (boundaries=): values cross in float32")
    elif ir.stays_float32(node):
        ruling.fix(node, "high", "type", "its kernel gives it in float32, whatever it reads")
    elif (problem := _untouchable(ruling, node)) is not None:
        ruling.fix(node, "high", "type", problem)
    elif is_conversion(node):
        _fix_conversion(ruling, node)
    elif asked_dtype(node) == torch.float32 and ir.holds_float32(node):
        ruling.fix(node, "high", "user dtype", "the user asked for a float32 result (dtype=torch.float32)")
        spread_taint(ruling, node)
    elif op in TRAITS["factory"] and asked_dtype(node) is None and ir.holds_float32(node):
        ruling.fix(node, "high", "creation", "no operand decides its dtype: it is torch's default")
        spread_taint(ruling, node)
    elif not ruling.reads[node] and colour != "unlisted":
        _fix_default_dtype(ruling, node)
    elif node in ruling.chosen and colour == "allow":
        ruling.fixed[node] = Verdict("low", ruling.chosen[node])
    elif node.meta.get("autocast") == "off":
        text = "stands in a region where the model's author switched autocast off"
        ruling.fix(node, "high", "user region", text)
        spread_taint(ruling, node)
    elif ruling.policy.everything_low and colour != "unlisted":
        _fix_at_o3(ruling, node)
    elif _gathers_trained_rows(node):
        _fix_rows(ruling, node)
    elif colour == "allow":
        _fix_allow(ruling, node)
    elif colour == "deny" and is_sum_of_squares(ruling, node):
        ruling.fix(node, "high", "square", "a sum of squares overflows fp16 early and loses half the exponent range")
    elif colour == "deny" and adds_to_what_is_there(node) and not ruling.is_spoken_of(node):
        text = f"adds to what is there in its dtype: 1 added 4096 times gives {_SUM_OF_ONES[ruling.policy.low]}"
        ruling.fix(node, "high", "sum", text)
    elif colour == "deny":
        ruling.fix(node, "high", "list", f"`{op}` is on the deny list: {_deny_reason(ruling.policy, node)}")
    elif colour == "unlisted":
        _fix_unlisted(ruling, node)
    else:
        fix_destroyed_values(ruling, node)
        if node not in ruling.fixed and adds_gradients_low(node) and not ruling.is_spoken_of(node):
            _fix_resampling(ruling, node)


def _fix_at_o3(ruling: Ruling, node: fx.Node) -> None:
    if is_beyond_range(node, ruling.policy.low):
        fix_destroyed_values(ruling, node)  # torch raises for such a number, or makes it infinite
    else:
        ruling.fix(node, "low", "level", "opt_level O3 runs everything low")


_SUM_OF_ONES = {torch.float16: "2048 in float16", torch.bfloat16: "256 in bfloat16"}
"""Where a sum of ones stays: the next one is less than half of a unit in the last place."""


def _fix_resampling(ruling: Ruling, node: fx.Node) -> None:
    low = dtype_name(ruling.policy.low)
    text = f"means of neighbours, whose gradients a GPU adds one by one: in {low} slower, and digits are lost"
    ruling.fix(node, "high", "gradient sums", text)


def _fix_unlisted(ruling: Ruling, node: fx.Node) -> None:
    op, asked = ir.mark(node).op, cast_by_autocast(node.target, ruling.policy.device)
    if node.meta.get(ir.MAY_BE_LOW) and (problem := _unfit_operand(ruling, node)):
        ruling.fix(node, "high", "operand", problem)
    elif multiplies := _multiplies_low_inside(ruling, node):
        ruling.fix(node, "low", "inside", f"calls `{multiplies}` for each sample, and nothing that is to be float32")
    elif asked is None:
        ruling.fix(node, "high", "unlisted", f"`{op}` is on no list, so it runs in the dtypes it had before")
    elif asked == ruling.policy.low:
        ruling.fix(node, "low", "author", f"the author of `{op}` has torch.autocast give it {dtype_name(asked)}")
    else:
        text = f"`{op}` is on no list, and its author has torch.autocast give it {dtype_name(asked)}"
        ruling.fix(node, "high", "unlisted", text)


def _multiplies_low_inside(ruling: Ruling, node: fx.Node) -> str | None:
    """An op of a function under torch.vmap that is worth low precision, where no other one is denied that."""
    if not node.meta.get(ir.MAY_BE_LOW):
        return None
    colours = {found: _colour_inside(ruling.policy, found) for found in node.meta[ir.INSIDE]}
    if not {"allow", "infer", "clear"}.issuperset(colours.values()):
        return None
    return next((found.op for found, colour in colours.items() if colour == "allow"), None)


def _colour_inside(policy: Policy, found: ir.OpInside) -> Colour:
    key = override_inside(found, policy.overrides)
    return _list_colour(policy, found.op) if key is None else policy.overrides[key]


def _unfit_operand(ruling: Ruling, node: fx.Node) -> str:
    """Which operand low precision would destroy where more than products is made of it; "" if there is none."""
    for source in ruling.sources(node):
        origin = ruling.through_clear(source)
        if source in ruling.tainted or (ir.is_weight(origin) and ruling.fit_of(origin) != "normal"):
            return f"{source.name} holds numbers that {dtype_name(ruling.policy.low)} does not"
        if origin in ruling.integers:
            return f"{origin.name} is made of positions or exact integers, which low precision rounds"
    return ""


def _fix_default_dtype(ruling: Ruling, node: fx.Node) -> None:
    """`torch.where(mask, 0.5, 0.0)`, `counts / 2`: only numbers say that the result is floating, and of which dtype."""
    fix_destroyed_values(ruling, node)
    if node not in ruling.fixed:
        ruling.fix(node, "high", "creation", "no floating-point operand decides its dtype: it is torch's default")


def _fix_source(ruling: Ruling, node: fx.Node) -> None:
    if node.meta.get("stored_low"):
        ruling.fix(node, "low", "parameter", "the parameter is stored in low precision (opt_level O2 or O3)")
    elif not ir.is_weight(node):
        ruling.fix(node, "high", "input", "an input comes in float32")
    else:
        ruling.fix(node, "high", "parameter", "parameters and buffers stay in float32")
        if ruling.fit_of(node) == "beyond":
            ruling.tainted.add(node)


def _deny_reason(policy: Policy, node: fx.Node) -> str:
    row = policy.lists.row(ir.mark(node).op)
    if row is None:
        return ""
    if row.origin != "default":
        return f"set by {row.origin}"
    if is_dot_product(node):
        return "this one is a sum, of numbers or of their products, and no GEMM"
    return row.reason if row.colour == "deny" else "torch.autocast runs it in float32, and so does level 'strict'"


def _untouchable(ruling: Ruling, node: fx.Node) -> str | None:
    """Why a node cannot take part: its types, its kernels, or weights inside a module."""
    op, own = ir.mark(node).op, list(tensors_in(ir.mark(node).type))
    if node.meta.get(ir.TRANSFORMED):
        return "it stands inside a torch.func transform (grad, vmap), whose levels a cast must not cross"
    if _is_of_unknown_block(node):
        return "it is taken out of what a block gives, which may be no tensor: sizes that hang on data hide what it is"
    if any(_differentiates(user, node) for user in node.users):
        return "autograd.grad differentiates with respect to it, and a cast of it would be another tensor"
    for given in node.all_input_nodes:
        for found in tensors_in(ir.mark(given).type):
            if found.dtype is None:
                return f"the dtype of its input {given.name} is not known before real inputs are seen"
            if found.dtype != torch.float32 and is_inexact(found.dtype) and not is_conversion(node):
                return f"its input {given.name} is {dtype_name(found.dtype)} by itself"
    if (sparse := ir.sparse_values(node)) and not is_conversion(node):
        name = "its result" if sparse[0] is node else f"its input {sparse[0].name}"
        return f"{name} is sparse: few kernels take a low one, and torch has no gradient for some casts of it"
    if any(found.dtype is None for found in own):
        return "what it gives is not known before real inputs are seen, or hangs on data"
    if any(found.dtype is not None and found.dtype.is_complex for found in own):
        return "it makes complex numbers"
    if ir.is_returned_whole(node):
        return "its result is returned whole, with named fields"
    if op == "view" and any(isinstance(argument, torch.dtype) for argument in (*node.args, *node.kwargs.values())):
        return "it reads the bits of a float32 value"
    if node.op == "call_module" and op not in ("batch_norm", "dropout") and node.meta.get("weights", True):
        whole = "hooks on it keep it whole: " if node.meta.get("hooked") else ""
        return whole + "its weights are read inside the module, where they stay float32"
    if ruling.policy.device == "cpu" and op in TRAITS["no_low_kernel_cpu"]:
        return f"the CPU has no {dtype_name(ruling.policy.low)} kernel for it"
    return None


def _is_of_unknown_block(node: fx.Node) -> bool:
    while node.target in (operator.getitem, getattr) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
        if node.meta.get("boundary"):
            return node.meta.get(ir.GUESS) is UNKNOWN
    return False


def _differentiates(user: fx.Node, node: fx.Node) -> bool:
    if user.target == "requires_grad_":
        return any(_differentiates(reader, user) or _differentiates(reader, node) for reader in user.users)
    inputs = ir.argument_of(user, 1, "inputs") if user.target is torch.autograd.grad else None
    return node in ir.nodes_in(inputs)


# Ops that pick rows: their backward adds the gradients of equal rows in the dtype of the table.
_GATHERS = frozenset({"embedding", "embedding_bag", "index_select", "gather", "take", "take_along_dim", "getitem"})


def _gathers_trained_rows(node: fx.Node) -> bool:
    """Whether rows of a trainable weight are picked by index."""
    if ir.mark(node).op not in _GATHERS:
        return False
    tables = [given for given in node.all_input_nodes if ir.is_weight(given) and ir.holds_float32(given)]
    indices = [given for given in node.all_input_nodes if given not in tables and ir.is_tensor(given)]
    trained = any(map(ir.has_gradient, tables))
    return trained and bool(indices)


def _fix_rows(ruling: Ruling, node: fx.Node) -> None:
    """The table stays float32 and the rows are cast: 4096 gradients of 1 for one row add up to 256 in bfloat16."""
    table = next(given for given in node.all_input_nodes if ir.is_weight(given))
    text = f"the gradients of equal rows of {table.name} are added in the table's dtype"
    ruling.fix(node, "high", "rows", text)
    if ruling.fit_of(table) == "normal" and ruling.policy.level != "strict":
        ruling.born.add(node)


def _fix_allow(ruling: Ruling, node: fx.Node) -> None:
    op = ir.mark(node).op
    if op in TRAITS["low_only"]:
        ruling.fix(node, "low", "kernel", "its kernels refuse float32, also where the model makes that of its operands")
        return
    operands = [read for read in ruling.reads[node] if not _is_mask(op, read)]
    for source in [source for read in operands for source in ruling.sources_of(read, node)]:
        origin = ruling.through_clear(source)
        if origin in ruling.integers and origin not in ruling.rounded:
            text = f"{origin.name} is made of positions or exact integers, which low precision rounds"
            ruling.fix(node, "high", "integers", text, origin)
            return
        verdict = ruling.fixed.get(origin)
        if verdict is not None and verdict.reason.kind == "user cast":
            ruling.fix(node, "high", "user operand", f"the user cast its operand {origin.name} to float32", origin)
            return
    if op in GATES and not ruling.policy.is_users_choice(op) and not _is_fused(op, ruling.policy):
        low = dtype_name(ruling.policy.low)
        ruling.fix(node, "high", "kernel", f"{ruling.policy.device} has one kernel for it in float32, none in {low}")
        return
    if op in _GROUPED_PRODUCTS and (unaligned := _unaligned(node)):
        text = f"its 16-bit kernels take rows of 16 bytes or a multiple, and {unaligned} is no multiple of 8"
        ruling.fix(node, "high", "kernel", text)
        return
    row = ruling.policy.lists.row(op)
    why = "" if row is None else row.reason if row.origin == "default" else f"set by {row.origin}"
    ruling.fix(node, "low", "list", f"`{op}` is on the allow list: {why}")


_GROUPED_PRODUCTS = frozenset({"_grouped_mm", "grouped_mm"})


def _unaligned(node: fx.Node) -> str:
    """The first size of a grouped product that its kernels refuse, forward or backward; "" if there is none."""
    left, right = (ir.shape_of(ir.argument_of(node, place, name)) for place, name in enumerate(("mat_a", "mat_b")))
    if left is None or right is None:
        return ""
    sizes = {"k": left[-1], "n": right[-1]}
    if len(right) == 2:
        sizes["m"] = left[-2]
    return next((f"{name} = {size}" for name, size in sizes.items() if size % 8), "")


def _is_fused(op: str, policy: Policy) -> bool:
    """Whether a recurrent layer is as few kernels low as in float32."""
    high = is_fused_recurrent(op, torch.float32, policy.device)
    return is_fused_recurrent(op, policy.low, policy.device) or not high


def _is_mask(op: str, read: Read) -> bool:
    """Whether an operand of attention is its mask: what a mask was made of says nothing about the GEMMs."""
    return "attention" in op and (read.keyword == "attn_mask" or read.position == 3)


def _fix_conversion(ruling: Ruling, node: fx.Node) -> None:
    target = converts_to(node)
    sources = {found.dtype for given in node.all_input_nodes for found in tensors_in(ir.mark(given).type)}
    spread_taint(ruling, node)
    if target == torch.float32:
        _fix_conversion_to_float32(ruling, node, sources)
    elif target is not None and target.is_floating_point:
        ruling.fix(node, "high", "user cast", f"the user cast a float32 value to {dtype_name(target)} here")


def _fix_conversion_to_float32(ruling: Ruling, node: fx.Node, sources: set[torch.dtype | None]) -> None:
    (source,) = node.all_input_nodes[:1] or (node,)
    if ir.PROMOTED in node.meta:
        _fix_promotion(ruling, node)
    elif any(found.stays for found in tensors_in(ir.mark(source).type)):
        ruling.fix(node, "high", "conversion", f"{source.name} is given in float32, whatever it reads")
    elif node in ruling.chosen and ruling.colours[node] == "allow":
        text = f"makes float32; that its readers need not be is by {ruling.chosen[node].text}"
        ruling.fix(node, "high", "conversion", text)
    elif sources == {torch.float32} and ruling.through_clear(node.all_input_nodes[0]).meta.get(ir.FROM_CALLER):
        ruling.fix(node, "high", "conversion", "makes sure that an input is float32, which it is")
    elif torch.float32 in sources or sources & {*LOW_DTYPES}:
        ruling.fix(node, "high", "user cast", "the user cast to float32 here")
    elif node in ruling.integers:
        ruling.fix(node, "high", "integers", "makes floats of integers, which low precision rounds")
    elif sources & {torch.float64}:
        ruling.fix(node, "high", "conversion", "makes float32 of float64")
    else:
        ruling.fix(node, "high", "conversion", "makes float32 of a mask or of bytes; they are exact in any dtype")
        ruling.born.add(node)


def _fix_promotion(ruling: Ruling, node: fx.Node) -> None:
    """A low value that stands beside float32 ones: widening is exact, and so is rounding it back."""
    (source,) = node.all_input_nodes
    dtype = next((found.dtype for found in tensors_in(ir.mark(source).type)), None)
    text = f"{source.name} is low by itself, and is read here as torch.autocast reads it"
    ruling.fix(node, "high", "conversion", text, source)
    if dtype == torch.bfloat16 and ruling.policy.low == torch.float16:
        ruling.tainted.add(node)  # it may hold numbers beyond float16's range
    else:
        ruling.born.add(node)
