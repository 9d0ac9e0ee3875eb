"""Pad the GEMMs of a graph to the sizes that Tensor Cores want, where that is safe and pays."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from torch import fx, nn

from fxamp import ir
from fxamp.fakes import Fakes
from fxamp.ir import PadNote
from fxamp.passes.alias import Aliases, find_aliases
from fxamp.passes.base import Pass
from fxamp.passes.gemm_types import Gemm
from fxamp.passes.gemms import OPS, describe
from fxamp.passes.pad_costs import VECTOR, carried, extra_of, is_worth_a_look, should_pad
from fxamp.passes.pad_edit import PadEditor
from fxamp.passes.pad_rules import can_pad
from fxamp.passes.pad_verify import pads_minimal
from fxamp.passes.padding_flow import Flow, Planned, follow, results_of
from fxamp.passes.padding_keep import Known, draws_random
from fxamp.passes.recurrent_gemms import Recurrent
from fxamp.passes.static_dims import Static, static_dims


@dataclasses.dataclass(frozen=True)
class PadGemms(Pass):
    """Pad K on both operands and N on weight and bias; slice N off where somebody would see it.

        y = linear(relu(linear(x, w, b)), v)                                # w: 1023 x 512, v: 512 x 1023
        y = linear(relu(linear(x, pad(w, 0:1), pad(b, 0:1))), pad(v, 1:1))  # 1024 between the two

    1. Parameters, buffers and their gradients keep their shapes; so do the model's outputs.
    2. A value stays padded through ops that act per element and are finite there, and only towards a GEMM or a
       loss that reads it padded.
    3. Only sizes that are the same in every call are padded, by a fixed number of elements.
    4. Every GEMM gets a PadNote: padded, aligned, left alone or not possible, and why.

    Attributes:
        root: resolves modules and their state.
        fakes: of the graph's inputs; None where no example inputs are known, and then nothing is padded.
        multiple: of which K and N are to be multiples, in elements; 8 for fp16 and bf16 (16 bytes).
        mode: "auto" pads what pays, "always" all that can be padded.
        training: path -> flag of the modules whose mode is a condition of the graph.
        fixed_sizes: whether the graph is only ever run with the sizes of its example.
    """

    ensures: ClassVar = (pads_minimal,)
    root: nn.Module
    fakes: Fakes | None = None
    multiple: int = 8
    mode: str = "auto"
    training: Mapping[str, bool] = dataclasses.field(default_factory=dict)
    fixed_sizes: bool = False

    def apply(self, graph: fx.Graph) -> bool:
        found = {node: describe(node) for node in graph.nodes if ir.mark(node).op in OPS and _is_new(node)}
        known = Known(self.root, static_dims(graph, self.fixed_sizes), self.training)
        aliases = find_aliases(graph)
        notes, plan = self._candidates(found, known.static)
        plan, flow, left = self._settle(graph, plan, known, aliases)
        for node, note in {**notes, **left}.items():
            ir.set_mark(node, pad=note)
        for node, planned in plan.items():
            ir.set_mark(node, pad=_padded_note(planned, flow, known))
        if plan:
            PadEditor(graph, plan, flow, aliases, self.root, self.fakes).run()
        return bool(plan)

    def _candidates(
        self, found: Mapping[fx.Node, Gemm | str], static: Mapping[fx.Node, Static]
    ) -> tuple[dict[fx.Node, PadNote], dict[fx.Node, Planned]]:
        """What is decided at once, and the GEMMs that may be padded."""
        notes: dict[fx.Node, PadNote] = {}
        plan: dict[fx.Node, Planned] = {}
        for node, gemm in found.items():
            if isinstance(gemm, str):
                notes[node] = PadNote("cannot", gemm)
                continue
            wanted = [extra_of(dim, self.multiple) for dim in gemm.dims]
            pairs = list(zip(gemm.dims, wanted, strict=True))
            why = [can_pad(gemm, dim, static) if extra else "" for dim, extra in pairs]
            extras = tuple(0 if reason else extra for extra, reason in zip(wanted, why, strict=True))
            if isinstance(gemm, Recurrent) and gemm.is_ambiguous(extras):
                text = f"{_sizes(gemm)}: padded, the projection and the hidden state would have one size"
                notes[node] = PadNote("cannot", text, _note_dims(gemm), gemm.rows)
            elif not any(extras):
                notes[node] = _unpadded_note(gemm, why, self.multiple)
            elif self.mode == "auto" and (reason := is_worth_a_look(gemm)):
                notes[node] = PadNote("left", f"{_sizes(gemm)}: {reason}", _note_dims(gemm), gemm.rows)
            else:
                plan[node] = Planned(gemm, extras)
        return notes, plan

    def _settle(
        self, graph: fx.Graph, plan: dict[fx.Node, Planned], known: Known, aliases: Aliases
    ) -> tuple[dict[fx.Node, Planned], Flow, dict[fx.Node, PadNote]]:
        """Drop what cannot, or would not pay, until the rest holds: costs depend on the neighbours."""
        left: dict[fx.Node, PadNote] = {}
        while True:
            flow = follow(graph, plan, known, aliases)
            dropped = {node: _without_columns(plan[node]) for node in flow.blocked}
            if self.mode == "auto" and not dropped:
                verdicts = {node: should_pad(planned, plan, flow) for node, planned in plan.items()}
                for node in [node for node, verdict in verdicts.items() if not verdict.pays]:
                    gemm = plan.pop(node).gemm
                    text = f"{_sizes(gemm)}: would not pay: it {verdicts[node].text}"
                    left[node] = PadNote("left", text, _note_dims(gemm), gemm.rows)
                    dropped[node] = None
            for node, rest in dropped.items():
                if rest is not None:
                    plan[node] = rest
                elif node in plan:
                    gemm, text = plan[node].gemm, f"{_sizes(plan.pop(node).gemm)}: {flow.blocked[node]}"
                    left[node] = PadNote("cannot", text, _note_dims(gemm), gemm.rows)
            if not dropped:
                return plan, flow, left


def _is_new(node: fx.Node) -> bool:
    note = ir.mark(node).pad
    return note is None or note.state != "padded"


def _without_columns(planned: Planned) -> Planned | None:
    """The plan with N as it is; None where nothing else was to be padded."""
    dims = planned.gemm.dims
    extras = tuple(extra if dim.out is None else 0 for dim, extra in zip(dims, planned.extras, strict=True))
    return Planned(planned.gemm, extras) if any(extras) else None


def _note_dims(gemm: Gemm, extras: tuple[int, ...] | None = None) -> tuple[tuple[str, int, int], ...]:
    extras = extras or (0,) * len(gemm.dims)
    return tuple((dim.name, dim.size, dim.size + extra) for dim, extra in zip(gemm.dims, extras, strict=True))


def _sizes(gemm: Gemm) -> str:
    return ", ".join(f"{dim.name} = {dim.size}" for dim in gemm.dims)


def _unpadded_note(gemm: Gemm, why: list[str], multiple: int) -> PadNote:
    reasons = list(dict.fromkeys(reason for reason in why if reason))
    if not reasons:
        return PadNote("aligned", f"{_sizes(gemm)}: multiples of {multiple}", _note_dims(gemm), gemm.rows)
    return PadNote("cannot", f"{_sizes(gemm)}: {'; '.join(reasons)}", _note_dims(gemm), gemm.rows)


def _padded_note(planned: Planned, flow: Flow, known: Known) -> PadNote:
    gemm, node, static, root = planned.gemm, planned.gemm.node, known.static, known.root
    grown = ", ".join(f"{dim.name} {dim.size} -> {dim.size + extra}" for dim, extra in planned.dims)
    others = [
        f"{dim.name} = {dim.size} is not: {can_pad(gemm, dim, static) or 'its result is written in place'}"
        for dim, extra in zip(gemm.dims, planned.extras, strict=True)
        if not extra and dim.size % VECTOR
    ]
    results = results_of(node, flow)
    is_kept = any(user in flow.kept or (made, user) not in flow.refused for made in results for user in made.users)
    tail = "; hidden from the loss without a slice" if node in flow.masked else ""
    if not tail and results:
        tail = "; stays padded" if is_kept else "; sliced off after it"
    if is_kept and any(draws_random(value, root) for value in carried(node, flow)):
        tail += "; dropout behind it draws its numbers for the padded shape"
    if isinstance(gemm, Recurrent) and gemm.drops and results:
        tail += "; its dropout draws numbers for the padded shape"
    return PadNote("padded", "; ".join([grown, *others]) + tail, _note_dims(gemm, planned.extras), gemm.rows, is_kept)
