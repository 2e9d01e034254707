"""Loops of a flow graph, from its edges alone: the same for every instruction set.

A back edge leads to a block that dominates its source; the loop is the target and all that reaches the source without
passing the target. Dominators as in Cooper, Harvey and Kennedy, "A Simple, Fast Dominance Algorithm" (2001).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Graph = Sequence[Sequence[int]]
"""Successors of each block. Block 0 is the entry; what it cannot reach has no loops."""


@dataclass(frozen=True)
class Cycle:
    """A natural loop.

    Attributes:
        header: the block that every turn begins with.
        blocks: all of its blocks, those of inner loops too.
        latches: the blocks that jump back to the header.
    """

    header: int
    blocks: frozenset[int]
    latches: frozenset[int]


def cycles(graph: Graph) -> list[Cycle]:
    """The natural loops, outer before inner, else in the order of their headers. Back edges to one header are one."""
    order = _reverse_postorder(graph)
    dominator = _dominators(graph, order)
    latches: dict[int, set[int]] = {}
    for source in order:
        for target in graph[source]:
            if _dominates(target, source, dominator):
                latches.setdefault(target, set()).add(source)
    found = [Cycle(header, _body(header, ends, graph, order), frozenset(ends)) for header, ends in latches.items()]
    return sorted(found, key=lambda cycle: (-len(cycle.blocks), cycle.header))


def _reverse_postorder(graph: Graph) -> list[int]:
    done: list[int] = []
    seen = {0}
    path = [(0, iter(graph[0]))]
    while path:
        block, left = path[-1]
        following = next((b for b in left if b not in seen), None)
        if following is None:
            done.append(block)
            path.pop()
        else:
            seen.add(following)
            path.append((following, iter(graph[following])))
    return done[::-1]


def _predecessors(graph: Graph, order: Sequence[int]) -> dict[int, list[int]]:
    before: dict[int, list[int]] = {block: [] for block in order}
    for block in order:
        for target in graph[block]:
            before[target].append(block)
    return before


def _dominators(graph: Graph, order: Sequence[int]) -> dict[int, int]:
    """The immediate dominator of each reachable block; the entry is its own."""
    before, rank = _predecessors(graph, order), {block: i for i, block in enumerate(order)}
    dominator = {0: 0}
    changed = True
    while changed:
        changed = False
        for block in order[1:]:
            known = [b for b in before[block] if b in dominator]
            nearest = known[0]
            for other in known[1:]:
                nearest = _meet(nearest, other, dominator, rank)
            if dominator.get(block) != nearest:
                dominator[block] = nearest
                changed = True
    return dominator


def _meet(a: int, b: int, dominator: dict[int, int], rank: dict[int, int]) -> int:
    while a != b:
        while rank[a] > rank[b]:
            a = dominator[a]
        while rank[b] > rank[a]:
            b = dominator[b]
    return a


def _dominates(a: int, b: int, dominator: dict[int, int]) -> bool:
    while b != a and b != 0:
        b = dominator[b]
    return a == b


def _body(header: int, ends: set[int], graph: Graph, order: Sequence[int]) -> frozenset[int]:
    before = _predecessors(graph, order)
    body, todo = {header}, list(ends)
    while todo:
        block = todo.pop()
        if block not in body:
            body.add(block)
            todo += before[block]
    return frozenset(body)
