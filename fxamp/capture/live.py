"""Numbers of modules that a graph reads at each call, because they have changed between calls (an annealed weight)."""

from collections.abc import Callable
from typing import Any

from torch import fx

from fxamp.capture.places import Place


class LiveNumbers:
    """The numbers that are values of one graph.

    Args:
        places: which numbers; all others are constants of the graph.
        make: makes the proxy that reads an attribute by its path, given its value now.

    Attributes:
        decided: places whose number Python's control flow used: the graph is for that number only.
    """

    def __init__(self, places: frozenset[Place], make: Callable[[str, Any], fx.Proxy]) -> None:
        self._places = places
        self._make = make
        self._proxies: dict[Place, fx.Proxy] = {}
        self.decided: set[Place] = set()

    def instead_of(self, place: Place, value: Any) -> fx.Proxy | None:
        """What stands for a number in the graph, None for what is a constant."""
        if place not in self._places or type(value) not in (int, float):
            return None
        if place not in self._proxies:
            self._proxies[place] = self._make(".".join(filter(None, place)), value)
        return self._proxies[place]

    def decide_on(self, node: fx.Node) -> bool:
        """Note which numbers a value that Python asked for hangs on; whether it hangs on anything else too."""
        if not self._proxies:
            return True
        places = {proxy.node: place for place, proxy in self._proxies.items()}
        waiting, seen, is_elsewhere = [node], {node}, False
        while waiting:
            given = waiting.pop()
            if given in places:
                self.decided.add(places[given])
            elif not given.all_input_nodes:
                is_elsewhere = True
            new = [inner for inner in given.all_input_nodes if inner not in seen]
            waiting += new
            seen.update(new)
        return is_elsewhere
