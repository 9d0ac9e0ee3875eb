# ruff: noqa: B023 - every search ends before the sets it looks at change
"""TensorFlow grappler's painting (AutoMixedPrecision, passes 1, 2, 3, 5 of ANCHORS 1.4) for plain fx graphs: an oracle.

Source: tensorflow/core/grappler/optimizers/auto_mixed_precision.cc, written down from its algorithm.
"""

from fxamp import ir


def paint(graph, lists):
    """The nodes that grappler runs in half precision."""
    colour = {
        node: lists.colour(ir.mark(node).op) if node.op.startswith("call") else "unlisted" for node in graph.nodes
    }
    floats = {node for node in graph.nodes if ir.holds_float32(node)}
    allow = {node for node in graph.nodes if colour[node] == "allow"}

    upstream = set()
    for root in graph.nodes:
        if colour[root] in ("deny", "infer"):
            upstream |= _search(root, _inputs, lambda n: n not in upstream and colour[n] == "clear")
    deny = set()
    for root in graph.nodes:
        if colour[root] == "deny" and root not in deny:
            deny |= _search(root, _outputs, lambda n: n not in deny and n in upstream)

    down = set()
    paintable = lambda n: colour[n] in ("clear", "infer") and n not in deny and n in floats  # noqa: E731
    for root in graph.nodes:
        if colour[root] == "allow":
            down |= _search(root, _outputs, lambda n: n not in down and paintable(n))
    up = set()
    for root in graph.nodes:
        if colour[root] == "allow" and root not in up:
            up |= _search(root, _inputs, lambda n: n not in up and n in down)
    allow |= up

    for root in [node for node in graph.nodes if node in allow]:
        near = lambda n: _inputs(n) + _outputs(n)  # noqa: E731
        clear = lambda n: n not in allow and n not in deny and colour[n] == "clear" and n in floats  # noqa: E731
        allow |= _search(root, near, clear)
    return allow


def casts(graph, half):
    """Casts of activations, at most one a value: every value that somebody reads in the other precision."""
    return sum(
        any((user in half) != (node in half) for user in node.users)
        for node in graph.nodes
        if node.op != "get_attr" and ir.holds_float32(node)
    )


def _search(root, step, enter):
    seen, pending = {root}, [root]
    while pending:
        for neighbour in step(pending.pop()):
            if neighbour not in seen and enter(neighbour):
                seen.add(neighbour)
                pending.append(neighbour)
    return seen


def _inputs(node):
    return list(node.all_input_nodes)


def _outputs(node):
    return list(node.users)
