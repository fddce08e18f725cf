"""Shortest paths in weighted graphs."""

import heapq
from collections import defaultdict


class Graph:
    """A directed graph with non-negative edge weights."""

    def __init__(self):
        self._edges = defaultdict(dict)

    def add_edge(self, source, target, weight=1):
        """Connect two nodes."""
        if weight < 0:
            raise ValueError("negative weight")
        self._edges[source][target] = weight
        self._edges.setdefault(target, {})

    def neighbors(self, node):
        """Iterate over (target, weight) pairs."""
        return self._edges[node].items()

    def shortest_path(self, source, target):
        """Find the cheapest path between two nodes with Dijkstra's algorithm.

        Returns a tuple of the total weight and the list of nodes, or None if
        the target cannot be reached.
        """
        distance = {source: 0}
        previous = {}
        queue = [(0, source)]
        visited = set()
        while queue:
            cost, node = heapq.heappop(queue)
            if node in visited:
                continue
            visited.add(node)
            if node == target: