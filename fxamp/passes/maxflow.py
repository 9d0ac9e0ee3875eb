"""Minimum s-t cuts in small integer networks: Dinic's algorithm on arrays.

networkx is exact too, but a component of a thousand nodes takes it seconds (tests/passes/test_mincut.py compares).

Source: Dinitz, "Algorithm for solution of a problem of maximum flow in networks with power estimation", 1970.
"""

SOURCE, SINK = 0, 1


class Network:
    """A directed network; nodes are numbers, 0 is the source and 1 the sink.

    Edges are kept in pairs: edge e and its reverse e ^ 1.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.heads: list[int] = []
        self.room: list[int] = []
        self.edges: list[list[int]] = [[] for _ in range(count)]

    def add_node(self) -> int:
        self.edges.append([])
        self.count += 1
        return self.count - 1

    def add_edge(self, tail: int, head: int, capacity: int) -> None:
        """Add an edge; what leads into the source or out of the sink carries nothing and is left out."""
        if tail in (head, SINK) or head == SOURCE or capacity <= 0:
            return
        self.edges[tail].append(len(self.heads))
        self.edges[head].append(len(self.heads) + 1)
        self.heads += (head, tail)
        self.room += (capacity, 0)

    def smallest_sink_side(self) -> set[int]:
        """The nodes that can reach the sink once a maximum flow is sent: the smallest sink side of a minimum cut."""
        while (levels := self._levels())[SOURCE] >= 0:
            self._block(levels)
        return {node for node, level in enumerate(levels) if level >= 0}

    def _levels(self) -> list[int]:
        """Distance of every node to the sink through edges with room, -1 where there is no way."""
        levels = [-1] * self.count
        levels[SINK] = 0
        frontier = [SINK]
        while frontier:
            reached = []
            for node in frontier:
                for edge in self.edges[node]:
                    tail = self.heads[edge]
                    if levels[tail] < 0 and self.room[edge ^ 1] > 0:
                        levels[tail] = levels[node] + 1
                        reached.append(tail)
            frontier = reached
        return levels

    def _block(self, levels: list[int]) -> None:
        """Send flow along shortest ways until each has a full edge."""
        following = [0] * self.count
        path: list[int] = []
        node = SOURCE
        while True:
            if node == SINK:
                node = self._send(path)
            elif (edge := self._advance(node, levels, following)) >= 0:
                path.append(edge)
                node = self.heads[edge]
            elif path:
                node = self.heads[path.pop() ^ 1]
                following[node] += 1
            else:
                return

    def _advance(self, node: int, levels: list[int], following: list[int]) -> int:
        """An edge with room that leads one step nearer to the sink, -1 where none is left."""
        edges = self.edges[node]
        while following[node] < len(edges):
            edge = edges[following[node]]
            if self.room[edge] > 0 and levels[self.heads[edge]] == levels[node] - 1:
                return edge
            following[node] += 1
        return -1

    def _send(self, path: list[int]) -> int:
        """Fill the narrowest edge of a path; cut the path back to it, and return the node where it goes on."""
        amount = min(self.room[edge] for edge in path)
        first = next(place for place, edge in enumerate(path) if self.room[edge] == amount)
        for edge in path:
            self.room[edge] -= amount
            self.room[edge ^ 1] += amount
        node = self.heads[path[first] ^ 1]
        del path[first:]
        return node
