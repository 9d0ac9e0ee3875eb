"""`torch.inference_mode()` in forward, as Dynamo's graphs hold it: run as `torch.no_grad()`.

It computes the same and gives no gradients. Its tensors would be of a kind that autograd may not keep, so a cast made
inside could not serve a reader outside.
"""

import torch
from torch import fx
from torch.autograd import grad_mode


def as_no_grad(graph: fx.Graph) -> None:
    """Switch the gradient mode where the graph enters and leaves inference mode."""
    befores: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if node.target is grad_mode._enter_inference_mode:
            with graph.inserting_before(node):
                befores[node] = graph.call_function(torch.is_grad_enabled)
                switch = graph.call_function(torch._C._set_grad_enabled, (not node.args[0],))
            for made in (befores[node], switch):
                made.meta.update({key: value for key, value in node.meta.items() if key != "example_value"})
        elif node.target is grad_mode._exit_inference_mode and node.args[0] in befores:
            node.target, node.args = torch._C._set_grad_enabled, (befores[node.args[0]],)
    for entered in befores:
        if not entered.users:
            graph.erase_node(entered)
