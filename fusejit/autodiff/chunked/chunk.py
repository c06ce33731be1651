"""Chunk: a matrix product whose rows are only reduced is computed a part of the rows at a time, so that it is never
held whole.

In: the joint graph of a forward and its gradients (or of a forward alone). Out: the same graph, changed in place, and a
line for explain().

    logits = mm(h, w); loss = cross_entropy(logits, t); dlogits; dh = mm(dlogits, w); dw = mm(dlogits.t(), h)
      ->  for each part of the rows: logits, loss of each row, dlogits, dh and dw += ... of the part

The region: everything as wide as the product, which has to be row-local (row_local.py); it ends in what has few values
a row, in products with other matrices, and in sums over all rows. No loss is known by name: soft-capping, z-loss, label
smoothing, distillation are rows too.

When gradients are computed: with the forward, for a gradient of one, and scaled in the backward, where one scalar
result asks for them (a loss) and the forward knows all that they need; otherwise the product is computed again in the
backward, part by part. In float16 too: there a gradient of one may underflow where a scaled loss does not.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable

import torch
from torch.fx import Graph, GraphModule, Node

from ...codegen.ir.effects import alive, sequence
from ...codegen.ir.reductions import REDUCTIONS, names, place_of
from ...codegen.ops.builder import line_of
from ...codegen.ops.decompositions import short
from .emit import Parts
from .row_local import PRODUCTS, NotLocal, Rows, columns_of, local, operands, tail, turned

aten = torch.ops.aten
FEW = 16  # values a row in which a region may end
MOST = 64  # parts at most: each is a call in the graph
ALIGNED = 64  # rows of a part are a multiple
BOTH = {
    name: (getattr(aten, row.name).default, getattr(aten, place_of(row.name).name).default)
    for row in REDUCTIONS.values()
    for name in names(row.both)
    if name.endswith(".dim")
}
"""{an op of a value and its place: the reductions to each}."""
"""Ops that give values of rows and their places, and what gives one of the two."""


def chunk(module: GraphModule, limit: int, compiler: Callable, flavour: str) -> list[str]:
    """Chunk every product of more than `limit` bytes that can be; returns what was done and what was refused, with
    reasons.
    """
    notes: list[str] = []
    found = (
        [n for n in module.graph.nodes if n.op == "call_function" and short(n.target) in PRODUCTS and _bytes(n) > limit]
        if limit
        else []
    )
    if found:
        one_result_each(module.graph, limit)
    for node in found:
        late = _below(n for n in module.graph.nodes if n.op == "placeholder" and n.name.startswith("tangents"))
        if node in late or node not in set(module.graph.nodes):  # a gradient; part of a region that is done
            continue
        what = f"{short(node.target)} of {' x '.join(map(str, node.meta['val'].shape))} ({_bytes(node) / 1e6:.1f} MB)"
        where = f"  {line_of(node)}".rstrip()
        try:
            done = _Region(module.graph, node, late, limit).run(compiler, flavour)
        except NotLocal as reason:
            notes.append(f"{what} is held whole: {reason}{where}")
            continue
        notes.append(f"{what} {done}{where}")
        in_order(module.graph)
        module.graph.eliminate_dead_code(lambda n: n.is_impure() or alive(n))
    if notes:
        module.graph.lint()
        module.recompile()
    return notes


def one_result_each(graph: Graph, limit: int) -> None:
    """Write the largest values of long rows and their places as two ops: a row-local op has one result."""
    for node in list(graph.nodes):
        if node.op != "call_function" or short(node.target) not in BOTH or node.kwargs or _bytes(node.args[0]) <= limit:  # type: ignore[arg-type]
            continue
        x, dim, keep = (*node.args, False)[:3]
        values, places = BOTH[short(node.target)]
        with graph.inserting_before(node):
            for user in list(node.users):
                target, dims = (values, [dim]) if user.args[1] == 0 else (places, dim)
                made = graph.call_function(target, (x, dims, keep))
                made.meta = dict(user.meta)
                user.replace_all_uses_with(made)
                graph.erase_node(user)
        graph.erase_node(node)


def _bytes(node: Node) -> int:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or any(isinstance(n, torch.SymInt) for n in value.shape):
        return 0  # how many parts sizes that vary make is no constant of a graph
    return value.numel() * value.dtype.itemsize


def _below(roots: Iterable[Node]) -> set[Node]:
    """The nodes that depend on any of `roots`, those included."""
    return _reached(roots, lambda node: node.users)


def _above(roots: Iterable[Node]) -> set[Node]:
    """The nodes that any of `roots` depends on, those included."""
    return _reached(roots, lambda node: node.all_input_nodes)


def _reached(roots: Iterable[Node], step: Callable[[Node], Iterable[Node]]) -> set[Node]:
    found, waiting = set[Node](), list(roots)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += step(node)
    return found


def in_order(graph: Graph) -> None:
    """Put nodes after what they need, those with an effect after the one before, otherwise in the order that they
    have.
    """
    place = {node: i for i, node in enumerate(graph.nodes)}
    turns = sequence(graph.nodes)
    followers = {before: node for node, before in turns.items()}
    waiting = {node: len(node.all_input_nodes) + (node in turns) for node in graph.nodes}
    ready = [place[node] for node, count in waiting.items() if not count]
    nodes, last = list(graph.nodes), None
    heapq.heapify(ready)
    while ready:
        node = nodes[heapq.heappop(ready)]
        if last is not None:
            last.append(node)
        last = node
        for user in [*node.users, *([followers[node]] if node in followers else [])]:
            waiting[user] -= 1
            if not waiting[user]:
                heapq.heappush(ready, place[user])


class _Region:
    """What is as wide as one product. `late` nodes need the gradients of results; `sums` add up rows."""

    def __init__(self, graph: Graph, product: Node, late: set[Node], limit: int) -> None:
        value = product.meta["val"]
        self.graph, self.product, self.late, self.limit = graph, product, late, limit
        self.rows = Rows(value.shape[0], value.shape[1])
        self.place = {node: i for i, node in enumerate(graph.nodes)}
        self.region: set[Node] = set()
        self.sums: set[Node] = set()
        self.below = _below([product])
        self.grow()

    # -- what belongs to it
    def grow(self) -> None:
        if self.rows.count < 2 or self.rows.columns < 2:
            raise NotLocal("it has one row or column")
        waiting = [self.product]
        self.region.add(self.product)
        while waiting:
            node = waiting.pop()
            for user in node.users:
                if user not in self.region | self.sums:
                    waiting += self.take(user, node)

    def take(self, user: Node, node: Node) -> list[Node]:
        """Let a reader of something wide into the region; returns what is wide because of it."""
        if user.op == "output":
            raise NotLocal("it, or something as large made of it, is a result")
        if turned(user):
            for reader in user.users:
                if not columns_of(reader, self.rows, self.region):
                    raise NotLocal(
                        f"{short(reader.target) if reader.op == 'call_function' else reader.op} needs it turned"
                    )
                self.sums.add(reader)
            return []
        if columns_of(user, self.rows, self.region):
            self.sums.add(user)
            return []
        found = self.pulled(user)
        local(user, self.rows, self.region)
        self.region.add(user)
        product = short(user.target) in PRODUCTS
        return [*found, *([user] if self.rows.wide(user) and not product else [])]

    def pulled(self, node: Node) -> list[Node]:
        """Let what a node reads besides, and is as wide, into the region; returns what is made of products: its readers
        belong there.

        The rest (a row repeated, a mask) is made again for each part, whoever else reads it.
        """
        found: list[Node] = []
        for operand in operands(node) if short(node.target) not in PRODUCTS else ():
            if operand in self.region or operand.op != "call_function" or not self.rows.wide(operand):
                continue
            made = self.pulled(operand)
            local(operand, self.rows, self.region)
            self.region.add(operand)
            found += [*made, *([operand] if made or operand in self.below or short(operand.target) in PRODUCTS else [])]
        return found

    def between(self, nodes: set[Node]) -> set[Node]:
        """Return the nodes on paths that leave some nodes and come back, all of which are row-local."""
        found = (_below(nodes) & _above(nodes)) - nodes - {n for n in self.graph.nodes if turned(n)}
        if sums := found & self.sums:
            raise NotLocal(f"{short(next(iter(sums)).target)} of all rows is needed to go on with each")
        for node in sorted(found, key=self.place.__getitem__):
            local(node, self.rows, nodes | found)
        return found

    # -- what becomes of it
    def run(self, compiler: Callable, flavour: str) -> str:
        late = self.region & self.late
        count = min(MOST, math.ceil(_bytes(self.product) / self.limit))
        each = math.ceil(self.rows.count / count)
        each = min(self.rows.count, -(-each // ALIGNED) * ALIGNED) if each > ALIGNED else each
        parts = Parts(self.graph, self.rows, each, self.place, compiler, flavour)
        most = each * self.rows.columns * self.product.meta["val"].dtype.itemsize
        said = f"in {math.ceil(self.rows.count / each)} parts of {each} rows: {most / 1e6:.1f} MB at once, "
        said += f"{(_bytes(self.product) - most) / 1e6:.1f} MB less"
        if not late:
            region = self.region | self.between(self.region)
            parts.write(region, self.sums, self.ends(region))
            return said
        tangents = [n for n in _above(late) if n in self.late and n.op == "placeholder"]
        try:
            if why := self.why_later(tangents):
                raise NotLocal(why)
            region = self.region | self.between(self.region)
        except NotLocal as why:
            self.twice(parts)
            return f"{said}; computed again for the gradients, since {why}"
        parts.write(region, self.sums, self.ends(region), tangents[0], self.late)
        return f"{said}; gradients with it, for one, scaled in the backward"

    def why_later(self, tangents: list[Node]) -> str:
        """Return why gradients cannot be computed before they are asked for, or ""."""
        if len(tangents) != 1 or tangents[0].meta["val"].numel() != 1:
            return "they are asked for with more than one number"
        if self.product.meta["val"].dtype is torch.float16:
            return "float16 may underflow before the loss is scaled"
        return ""

    def twice(self, parts: Parts) -> None:
        """Write the forward and, computing again what is as wide as the product, the backward."""
        early, late = self.region - self.late, self.region & self.late
        early |= self.between(early)
        late |= self.between(late)
        self.ends(early | late)
        known = {n for n in early if not self.rows.wide(n)}
        again = late | self.again(late, early - known)
        ends = [n for n in known if any(user not in early or user in again for user in n.users)]
        parts.write(early, self.sums - self.late, sorted(ends, key=self.place.__getitem__))
        parts.write(again, self.sums & self.late, [n for n in self.exits(again) if n in self.late])

    def again(self, late: set[Node], wide: set[Node]) -> set[Node]:
        """Return what of the wide values of the forward the backward reads."""
        found, waiting = set[Node](), [*late, *(self.sums & self.late)]
        while waiting:
            for operand in waiting.pop().all_input_nodes:
                for node in (operand, *(operand.all_input_nodes if turned(operand) else ())):
                    if node in wide and node not in found:
                        found.add(node)
                        waiting.append(node)
        return found

    def exits(self, region: set[Node]) -> list[Node]:
        """Return the values of a region that others read, in order."""
        inside = region | self.sums | {n for n in self.graph.nodes if turned(n) and n.args[0] in region}
        found = [n for n in region if any(user not in inside for user in n.users)]
        return sorted(found, key=self.place.__getitem__)

    def ends(self, region: set[Node]) -> list[Node]:
        """Return what others read of a region; refuse a forward that ends in long rows: there is little to save."""
        found = self.exits(region)
        for node in found:
            lead = self.rows.lead(node)
            size = math.prod(tail(node, lead)) if lead is not None else 0
            if node not in self.late and size > FEW:
                raise NotLocal(f"its rows end in {size} values each ({short(node.target)}), not in a reduction")
        return found
