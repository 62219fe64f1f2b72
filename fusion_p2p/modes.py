"""One graph for train and eval: where a module's two modes differ beyond dropout and batch norm, select by mode.

The two captures are aligned node by node. Aligned nodes are shared, with `fusion.by_mode` in front of an argument that
differs; the rest runs in its own mode only. Any alignment is correct; a better one only shares more.
"""

from __future__ import annotations

import difflib
from typing import Any

import torch

from fusion_p2p.canonical import Draw, Raw
from fusion_p2p.errors import CaptureError
from fusion_p2p.ir import Arg, ListArg, Node, Ref, refs
from fusion_p2p.ops_fusion import DROPOUTS

_SAME = {  # the mode-aware operator that stands for both
    "fusion.batch_norm_frozen": "fusion.batch_norm",
    "aten.scaled_dot_product_attention": "fusion.sdpa",
}


def _shape(raw: Raw, node: Node) -> tuple[Any, ...]:
    """What aligned nodes must agree in: operator, constants, number and type of results."""

    def described(a: Arg) -> Any:
        if isinstance(a, Ref):
            return "ref"
        if isinstance(a, ListArg):
            return ("list", *map(described, a.items))
        return (type(a).__name__, a)

    op = _SAME.get(node.op, node.op)
    first = raw.values[node.outs[0] if node.outs[0] >= 0 else max(node.outs)]
    if op in ("fusion.batch_norm", "fusion.sdpa"):
        return (op, first, len(refs(node.args)))
    named = ((k, described(a)) for k, a in node.kwargs.items())
    return (op, first, len(node.outs), *map(described, node.args), *named)


class _Combine:
    def __init__(self, train: Raw, evaluation: Raw) -> None:
        self.train, self.eval = train, evaluation
        self.nodes: list[Node] = []
        self.where: list[str] = []
        self.to_train: dict[int, int] = {}  # eval value -> value of the combined graph
        self.in_eval: dict[
            int, int
        ] = {}  # value -> the value it equals in eval mode (dropout and copies are the identity)
        self.selected: dict[tuple[int, int], int] = {}
        self.sites: dict[int, int] = {}  # site in the eval capture -> site in the combined graph
        self.next_site = 1 + max((n.site for n in (*train.nodes, *evaluation.nodes)), default=0)

    def run(self) -> Raw:
        t, e = self.train, self.eval
        self._sources()
        mine = [n for n in t.nodes if n.op not in DROPOUTS or n.op == "fusion.sdpa"]
        at = {id(n): i for i, n in enumerate(t.nodes)}
        matcher = difflib.SequenceMatcher(
            None, [_shape(t, n) for n in mine], [_shape(e, n) for n in e.nodes], autojunk=False
        )
        done_train = done_eval = 0
        for block in matcher.get_matching_blocks():
            for k in range(block.size):
                i, j = at[id(mine[block.a + k])], block.b + k
                self._train_only(done_train, i)
                self._eval_only(done_eval, j)
                self._shared(i, j)
                done_train, done_eval = i + 1, j + 1
        self._train_only(done_train, len(t.nodes))
        self._eval_only(done_eval, len(e.nodes))
        loss = self._pick(t.loss, self.to_train[e.loss], "the loss")
        if loss is None:
            raise CaptureError("the loss has another shape or dtype in eval mode; return the same in both modes")
        t.nodes, t.where, t.loss = self.nodes, self.where, loss
        t.eval_draws = [Draw(self.sites.get(d.site, -1), d.op, d.shape) for d in e.draws]
        return t

    def _sources(self) -> None:
        t, e = self.train, self.eval
        inputs = dict(t.inputs)
        for position, vid in e.inputs:
            if not self._known(vid, inputs.get(position)):
                t.inputs.append((position, self._new(vid)))
        for name, vid in e.params.items():
            if not self._known(vid, t.params.get(name)):
                t.params[name] = self._new(vid)
        for name, vid in e.buffers.items():
            if not self._known(vid, t.buffers.get(name)):
                t.buffers[name] = self._new(vid)
        free = list(t.consts)  # each stands for one constant of eval mode, so that equal ones pair in order
        for vid, tensor in e.consts:
            same = next((c for c in free if c[1].dtype == tensor.dtype and torch.equal(c[1], tensor)), None)
            if same is None:
                t.consts.append((self._new(vid), tensor))
            else:
                free = [c for c in free if c[0] != same[0]]
                self.to_train[vid] = same[0]

    def _known(self, eval_id: int, train_id: int | None) -> bool:
        if train_id is not None:
            self.to_train[eval_id] = train_id
        return train_id is not None

    def _new(self, eval_id: int) -> int:
        new = self.to_train[eval_id] = self.train.value(self.eval.values[eval_id])
        return new

    def _as_eval(self, vid: int) -> int:
        return self.in_eval.get(vid, vid)

    def _train_only(self, start: int, stop: int) -> None:
        for node, where in zip(self.train.nodes[start:stop], self.train.where[start:stop], strict=True):
            self.nodes.append(node)
            self.where.append(where)
            if (node.op in DROPOUTS or node.op == "aten.clone") and isinstance(node.args[0], Ref):
                self.in_eval[node.outs[0]] = self._as_eval(node.args[0].id)

    def _eval_only(self, start: int, stop: int) -> None:
        for node, where in zip(self.eval.nodes[start:stop], self.eval.where[start:stop], strict=True):
            if node.op in DROPOUTS:
                raise CaptureError(f"{where}: dropout stays on in eval mode; pass training=self.training")
            new = Node(
                op=node.op,
                args=tuple(self._translate(a) for a in node.args),
                kwargs={k: self._translate(a) for k, a in node.kwargs.items()},
                outs=tuple(self._new(o) for o in node.outs),
                site=self._site(),
            )
            self.sites[node.site] = new.site
            self.nodes.append(new)
            self.where.append(where)

    def _shared(self, i: int, j: int) -> None:
        mine, where, theirs = self.train.nodes[i], self.train.where[i], self.eval.nodes[j]
        pairs = list(zip(refs((mine.args, mine.kwargs)), refs((theirs.args, theirs.kwargs)), strict=True))
        before = len(self.nodes)
        picks = [self._pick(a, self.to_train[b], where) for a, b in pairs]
        if any(p is None for p in picks):  # shapes differ: each mode keeps its own node
            del self.nodes[before:], self.where[before:]
            self.selected = {k: v for k, v in self.selected.items() if v not in picks}
            self.nodes.append(mine)
            self.where.append(where)
            self._eval_only(j, j + 1)
            return
        chosen = iter(picks)

        def replaced(a: Arg) -> Arg:
            if isinstance(a, Ref):
                return Ref(next(chosen) or 0)
            return ListArg(tuple(replaced(i) for i in a.items)) if isinstance(a, ListArg) else a

        args = tuple(replaced(a) for a in mine.args)
        kwargs = {k: replaced(mine.kwargs[k]) for k in mine.kwargs}
        self.nodes.append(Node(op=mine.op, args=args, kwargs=kwargs, outs=mine.outs, site=mine.site))
        self.where.append(where)
        self.to_train.update(zip(theirs.outs, mine.outs, strict=False))
        self.sites[theirs.site] = mine.site

    def _pick(self, train_id: int, eval_id: int, where: str) -> int | None:
        """The value that is `train_id` in training and `eval_id` in eval; None if their shapes differ."""
        if self._as_eval(train_id) == self._as_eval(eval_id):
            return train_id
        if self.train.values[train_id] != self.train.values[eval_id]:
            return None
        key = (train_id, eval_id)
        if key not in self.selected:
            out = self.selected[key] = self.train.value(self.train.values[train_id])
            args = (Ref(train_id), Ref(eval_id))
            self.nodes.append(Node(op="fusion.by_mode", args=args, kwargs={}, outs=(out,), site=self._site()))
            self.where.append(where)
        return self.selected[key]

    def _translate(self, a: Arg) -> Arg:
        if isinstance(a, Ref):
            return Ref(self.to_train[a.id])
        return ListArg(tuple(self._translate(i) for i in a.items)) if isinstance(a, ListArg) else a

    def _site(self) -> int:
        self.next_site += 1
        return self.next_site - 1


def combine(train: Raw, evaluation: Raw) -> Raw:
    """`train` extended, in place, by what eval mode does otherwise; buffers keep their train-mode updates only."""
    return _Combine(train, evaluation).run()
