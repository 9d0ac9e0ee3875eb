"""What would give a node the other precision: one sentence each, with the setting that does it."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence

from fxamp import ir
from fxamp.lists import OpLists
from fxamp.passes.reads import CONVERSIONS
from fxamp.review.chain import Rows, readers_of
from fxamp.review.outcomes import Outcomes
from fxamp.review.rows import Row


@dataclasses.dataclass(frozen=True)
class Remedy:
    """One way to change a decision.

    Attributes:
        text: the sentence a reader gets.
        overrides, environment, options: the same as arguments of convert() and shell variables; empty where
            only the user's code can change it.
    """

    text: str
    overrides: Mapping[str, str] = dataclasses.field(default_factory=dict)
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)


def remedies_for(chain: Sequence[Row], rows: Rows, lists: OpLists, outcomes: Outcomes) -> list[Remedy]:
    """Every way to change the precision of `chain[0]`, whose reason ends at `chain[-1]`, mildest first.

    Args:
        rows: of the same graph, by name.
        outcomes: of the same model.
    """
    row = chain[0]
    root = next((link for link in chain if link.reason_kind in _DECISIVE), chain[-1])
    if row.role:
        return [Remedy("it is gone when its readers run in the precision of the value they read")]
    if row.precision == "low":
        return list(_towards_float32(row, root))
    if gives_no_float(row):
        return [Remedy(f"nothing: it gives {row.dtype}, and only float32 values change dtype")]
    if row.precision == "none":
        return [Remedy(f"nothing: it {row.reason}, and only float32 values change dtype")]
    if row.op == "parameter" and row.reason_kind == "parameter":
        return list(_parameter(row, rows, outcomes))
    return _towards_low(row, root, lists, outcomes)


def gives_no_float(row: Row) -> bool:
    """Whether the node converts what it reads to integers, which it takes as it comes, in any precision."""
    return row.op in CONVERSIONS and bool(row.dtype) and "float" not in row.dtype and "complex" not in row.dtype


def _towards_low(row: Row, root: Row, lists: OpLists, outcomes: Outcomes) -> list[Remedy]:
    found = list(_HIGH.get(root.reason_kind, _LOW)(root, lists))
    if (_is_by_level(row) or _is_by_level(root)) and (level := outcomes.mildest_low(row)) is not None:
        found.insert(0, Remedy(f'convert(..., level="{level}") lets it run low', options={"level": level}))
    if row is not root and root.reason_kind not in _FINAL:
        found.append(_override(row, "allow", "runs this node low whatever it reads"))
    it = "this one" if row is root else f"{root.name}, and with it {row.name},"
    tried = (_tried(dataclasses.replace(each, text=each.text.replace("{it}", it)), row, outcomes) for each in found)
    return [remedy for remedy in tried if remedy is not None]


def _tried(remedy: Remedy, row: Row, outcomes: Outcomes) -> Remedy | None:
    """The remedy if it makes the node low; what stands in its way, if that is an override of the node itself.

    By the rules such an override holds, but for what `Outcomes.may_not_follow` says; what is said of other nodes, or of
    an op wherever it stands, is tried.
    """
    is_own = row.name in remedy.overrides
    has_setting = bool(remedy.overrides or remedy.environment)
    if not has_setting or (is_own and not outcomes.may_not_follow(row)):
        return remedy
    after = outcomes.row_under(row, remedy.overrides, remedy.environment)
    if after is None or after.precision == "low":
        return remedy
    return Remedy(f"overrides={_dict(row.name, 'allow')} alone does not: {after.reason}") if is_own else None


def _override(row: Row, colour: str, effect: str) -> Remedy:
    """In `effect`, "{it}" stands for the node, and for the one that was asked for, where that is another."""
    return Remedy(f"convert(..., overrides={_dict(row.name, colour)}) {effect}", overrides={row.name: colour})


def _dict(key: str, value: str) -> str:
    return json.dumps({key: value})


def _towards_float32(row: Row, root: Row) -> Iterator[Remedy]:
    if row.is_source:
        yield Remedy('opt_level="O1" keeps parameters in float32', options={"opt_level": "O1"})
        return
    if root.reason_kind == "override":
        yield Remedy("take that override out: " + root.reason)
    yield _override(row, "deny", "keeps this node in float32")
    if root.reason_kind == "level":
        if root.colour not in ("allow", "infer", "clear"):  # by the lists it may run low, too
            yield Remedy('opt_level="O1" follows the lists', options={"opt_level": "O1"})
        return
    if row.module:
        text = f"convert(..., overrides={_dict(row.module, 'deny')}) keeps its whole module in float32"
        yield Remedy(text, overrides={row.module: "deny"})
    if row.op and row.op not in CONVERSIONS:  # which give what they are asked for, whatever their list
        text = f"FXAMP_DENYLIST_ADD={row.op} keeps every `{row.op}` in float32"
        yield Remedy(text, environment={"FXAMP_DENYLIST_ADD": row.op})


def _by_list(root: Row, lists: OpLists) -> Iterator[Remedy]:
    row = lists.row(root.op)
    origin = row.origin if row is not None else "default"
    if origin.startswith("FXAMP_"):
        yield Remedy(f"unset {origin}, which put `{root.op}` on the {root.colour} list")
    elif origin != "default":
        yield Remedy(f"take `{root.op}` out of {origin}, which put it on the {root.colour} list")
    if _is_by_level(root):
        yield _override(root, "allow", "runs {it} low and keeps the level")
        return
    text = (
        f"take `{root.op}` off the deny list: FXAMP_INFERLIST_ADD={root.op} moves it to infer: it then "
        "runs low where what it reads is low and that saves casts "
        f"(FXAMP_DENYLIST_REMOVE={root.op} alone: unlisted, float32)"
    )
    yield Remedy(text, environment={"FXAMP_INFERLIST_ADD": root.op})
    yield _override(root, "allow", "runs {it} low and leaves the list alone")


def _is_by_level(root: Row) -> bool:
    """Whether another level may decide otherwise."""
    return root.reason_kind in ("not low-born", "stream") or "level 'strict'" in root.reason


def _unlisted(root: Row, lists: OpLists) -> Iterator[Remedy]:
    text = f"list it: FXAMP_INFERLIST_ADD={root.op} (low where what it reads is low), or ALLOWLIST (always low)"
    yield Remedy(text, environment={"FXAMP_INFERLIST_ADD": root.op})
    yield _override(root, "allow", "runs {it} low")


def _allowing(effect: str) -> Callable[[Row, OpLists], Iterator[Remedy]]:
    def remedy(root: Row, lists: OpLists) -> Iterator[Remedy]:
        yield _override(root, "allow", effect)

    return remedy


def _literal(root: Row, lists: OpLists) -> Iterator[Remedy]:
    danger = "it is rounded there, to zero or away"
    if "largest number" in root.reason:
        danger = "torch refuses such a number there, or makes it infinite"
        yield Remedy(f"change the number at {root.line or root.name}: a mask is filled with torch.finfo(x.dtype).min")
    yield _override(root, "allow", _ANYWAY + danger)


def _user_cast(root: Row, lists: OpLists) -> Iterator[Remedy]:
    where = f" at {root.line}" if root.line else ""
    yield Remedy(f"take the conversion{where} out of the model's code")


def _user_dtype(root: Row, lists: OpLists) -> Iterator[Remedy]:
    yield Remedy(f"take dtype=torch.float32 out of {root.line or root.name}: it asks for a float32 result")


def _planned(root: Row, lists: OpLists) -> Iterator[Remedy]:
    yield Remedy("change its line in the plan, or convert without plan=")
    yield _override(root, "allow", "is stronger than the plan")


def _user_region(root: Row, lists: OpLists) -> Iterator[Remedy]:
    yield Remedy(f"take {root.line or 'it'} out of the region where autocast is switched off")
    yield _override(root, "allow", "runs {it} low although the model's author protected it")


def _overridden(root: Row, lists: OpLists) -> Iterator[Remedy]:
    if "_keep_in_fp32_modules" in root.reason:
        yield _override(root, "allow", "is stronger than the model's _keep_in_fp32_modules")
    else:
        yield Remedy(f"take that entry out of convert(..., overrides=): {root.reason}")


def _input(root: Row, lists: OpLists) -> Iterator[Remedy]:
    yield Remedy(f"{root.name} is an input, and inputs come as the caller gives them")


def _parameter(row: Row, rows: Rows, outcomes: Outcomes) -> Iterator[Remedy]:
    """O2 stores low what is only read low: a table that is read by rows, or tied to one, is not."""
    if not outcomes.goes_with_o2:
        yield Remedy(
            "nothing here: it is cast where it is read low; opt_level='O2' stores such parameters low, and goes "
            "neither with a model that Dynamo captured nor with boundaries="
        )
        return
    in_float32 = [reader for reader in readers_of(row, rows) if reader.role != "weight cast"]
    if in_float32:
        yield Remedy(f"nothing here: {in_float32[0].name} reads it in float32; see fxamp.explain of that node")
        return
    text = 'convert(..., opt_level="O2") stores parameters that are only read low in low precision, with '
    yield Remedy(text + "float32 masters in fxamp.MasterWeightOptimizer", options={"opt_level": "O2"})


def _read_parameter(root: Row, lists: OpLists) -> Iterator[Remedy]:
    yield Remedy(f"nothing at {root.name}: it stays in float32, and a cast is made where it is read low")


def _type(root: Row, lists: OpLists) -> Iterator[Remedy]:
    if "not known" in root.reason:
        yield Remedy("pass example_inputs to fxamp.convert, or call the model once: types are then known")
    elif "inside the module" in root.reason:
        if "hooks" in root.reason:
            yield Remedy(
                f"convert(..., boundaries=[{root.module!r}]) converts it by itself, and its hooks go on firing"
            )
        else:
            yield Remedy(f"nothing but another module: `{root.op}` reads its weights itself")
    else:
        yield Remedy("nothing: only float32 values change dtype")


def _aliasing(root: Row, lists: OpLists) -> Iterator[Remedy]:
    yield Remedy(f"write {root.line or 'it'} out of place (y = f(x) instead of f_(x)): then each value has its own")


def _conversion(root: Row, lists: OpLists) -> Iterator[Remedy]:
    yield Remedy("nothing needs to: a cast is made where it is read low")


def _integers(root: Row, lists: OpLists) -> Iterator[Remedy]:
    danger = "integers beyond 2048 in float16, 256 in bfloat16, are rounded"
    if root.op in ("float", "to", "type"):
        yield Remedy(f"nothing at {root.line or root.name} itself, which makes float32; where it is read low, {danger}")
    else:
        yield _override(root, "allow", _ANYWAY + danger)


def _kernel(root: Row, lists: OpLists) -> Iterator[Remedy]:
    yield Remedy("convert(..., dtype=torch.float16): there is a kernel for it", options={"dtype": "float16"})
    yield _override(root, "allow", _ANYWAY + "torch then takes several kernels for each step of the sequence")


def _boundary(root: Row, lists: OpLists) -> Iterator[Remedy]:
    yield Remedy(f"leave {root.name} out of boundaries=: its forward is then a part of this graph")


_ANYWAY = "runs {it} low all the same; "
_LOW = _allowing("runs {it} low")
_HIGH: Mapping[ir.Rule, Callable[[Row, OpLists], Iterator[Remedy]]] = {
    "list": _by_list,
    "unlisted": _unlisted,
    "literal": _literal,
    "taint": _allowing(_ANYWAY + "numbers beyond the range become inf"),
    "integers": _integers,
    "rows": _allowing("picks low rows; the gradients of equal rows are then added in low precision"),
    "gradient sums": _allowing("runs {it} low; its gradients are then added up in low precision"),
    "sum": _allowing(_ANYWAY + "of many summands for one place the later ones are lost"),
    "square": _allowing(_ANYWAY + "scale the operand down first, or the square overflows float16 from 256"),
    "upstream": _allowing(_ANYWAY + "rounding may take the argument out of the domain: -inf or NaN"),
    "position": _allowing(_ANYWAY + "rounding changes positions, bins and what is larger"),
    "user cast": _user_cast,
    "user operand": _user_cast,
    "user region": _user_region,
    "override": _overridden,
    "not low-born": _LOW,
    "stream": _LOW,
    "state": _allowing(_ANYWAY + "small changes of the state are then lost, call after call"),
    "differences": _allowing(_ANYWAY + "what is rounded may be as large as the differences that the result goes by"),
    "not between": _LOW,
    "input": _input,
    "parameter": _read_parameter,
    "type": _type,
    "aliasing": _aliasing,
    "conversion": _conversion,
    "creation": _conversion,
    "user dtype": _user_dtype,
    "ranges": _allowing("runs {it} low although values that were measured do not fit"),
    "plan": _planned,
    "boundary": _boundary,
    "kernel": _kernel,
}
_DECISIVE: frozenset[ir.Rule] = frozenset(("upstream", "position", "aliasing"))
"""Kinds that decide by themselves: what their reason names is not what to change."""
_FINAL: frozenset[ir.Rule] = frozenset(("type", "boundary"))
"""Roots that no override can get past."""
