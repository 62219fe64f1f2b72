"""Run OP-DAG nodes on real tensors. Autograd records through it; nothing is generated, evaluated or compiled.

A `Program` resolves everything once (callable, argument slots, last uses), and batch-dependent integers once per
micro-batch size, so a node costs about a microsecond over the call itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch

from fusion_p2p.ir import Arg, BatchInt, DTypeArg, EnumArg, ListArg, Node, Ref, refs
from fusion_p2p.ops_fusion import Ctx
from fusion_p2p.ops_table import words
from fusion_p2p.opset import OPS, dtype_of
from fusion_p2p.seeded import RngKey

Env = MutableMapping[int, torch.Tensor]

_CPU = torch.device("cpu")
_ENUMS: Mapping[str, Any] = {
    "inf": float("inf"),
    "-inf": float("-inf"),
    "contiguous": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "preserve": torch.preserve_format,
}


class _Call(NamedTuple):
    fn: Callable[..., Any]
    ctx: bool
    site: int
    args: list[Any]
    slots: tuple[tuple[int, int], ...]  # (position in args, value id)
    lists: tuple[tuple[int, tuple[int | None, ...]], ...]  # (position in args, value ids) of tensor lists
    kwargs: dict[str, Any]
    kwslots: tuple[tuple[str, int], ...]
    outs: tuple[int, ...]
    many: bool
    dead: tuple[int, ...]


def _constant(a: Arg, batch: int) -> Any:
    if isinstance(a, BatchInt):
        return a.at(batch)
    if isinstance(a, DTypeArg):
        return dtype_of(a.name)
    if isinstance(a, EnumArg):
        return _ENUMS.get(a.name, a.name)
    if isinstance(a, ListArg):
        return [_constant(i, batch) for i in a.items]
    return a


def bind(node: Node, batch: int, tensor: Callable[[int], torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
    """The node's arguments as its callable takes them; `tensor` gives the tensor of a value id."""

    def value(a: Arg) -> Any:
        if isinstance(a, Ref):
            return tensor(a.id)
        if isinstance(a, ListArg):
            return [value(i) for i in a.items]
        return _constant(a, batch)

    return [value(a) for a in node.args], {k: value(a) for k, a in node.kwargs.items()}


def _is_tensor_list(a: Arg) -> bool:
    return isinstance(a, ListArg) and any(isinstance(i, Ref) for i in a.items)


def _prepare(node: Node, dead: tuple[int, ...], batch: int, training: bool) -> _Call:
    if node.op == BY_MODE:
        node = Node(op=node.op, args=node.args[:1] if training else node.args[1:], kwargs={}, outs=node.outs, site=0)
    op = OPS[node.op]
    args: list[Any] = []
    slots: list[tuple[int, int]] = []
    lists: list[tuple[int, tuple[int | None, ...]]] = []
    kwargs: dict[str, Any] = {}
    kwslots: list[tuple[str, int]] = []
    for i, a in enumerate(node.args):
        if isinstance(a, Ref):
            slots.append((i, a.id))
            args.append(None)
        elif isinstance(a, ListArg) and _is_tensor_list(a):
            lists.append((i, tuple(r.id if isinstance(r, Ref) else None for r in a.items)))
            args.append(None)
        else:
            args.append(_constant(a, batch))
    for key, a in node.kwargs.items():
        if isinstance(a, Ref):
            kwslots.append((key, a.id))
        elif isinstance(a, ListArg) and _is_tensor_list(a):
            raise ValueError(f"{node.op}: a list of tensors is given by position, not as {key!r}")
        else:
            kwargs[key] = _constant(a, batch)
    return _Call(
        fn=op.fn,
        ctx=op.ctx,
        site=node.site,
        args=args,
        slots=tuple(slots),
        lists=tuple(lists),
        kwargs=kwargs,
        kwslots=tuple(kwslots),
        outs=node.outs,
        many=returns_many(node.op) or len(node.outs) > 1,
        dead=dead,
    )


BY_MODE = "fusion.by_mode"  # (value in training, value in eval)
_MANY = words(
    "aten.split.Tensor aten.split_with_sizes aten.unbind.int aten.broadcast_tensors aten.max.dim aten.min.dim "
    "aten.cummax aten.cummin aten.topk aten.sort aten.max_pool2d_with_indices aten.adaptive_max_pool2d "
    "aten.var_mean.correction fusion.batch_norm fusion.gru fusion.lstm fusion.rnn_relu fusion.rnn_tanh"
)


def returns_many(op: str) -> bool:
    """Whether the operator returns a tuple or list of tensors, also when it has one element."""
    return op in _MANY


def _reads(node: Node, training: bool) -> list[int]:
    """What the node reads in this mode."""
    if node.op == BY_MODE:
        return refs(node.args[:1] if training else node.args[1:])
    return refs(node.args) + refs(node.kwargs)


def _of_mode(nodes: tuple[Node, ...], keep: frozenset[int], training: bool) -> tuple[Node, ...]:
    """The nodes that `keep` needs in this mode; all of them where both modes run the same."""
    if not any(n.op == BY_MODE for n in nodes):
        return nodes
    needed, live = set(keep), []
    for node in reversed(nodes):
        if needed.intersection(node.outs):
            needed.update(_reads(node, training))
            live.append(node)
    return tuple(reversed(live))


def _last_uses(nodes: Sequence[Node], keep: frozenset[int], training: bool) -> list[tuple[int, ...]]:
    """Per node, the values no later node reads and nobody keeps."""
    seen: set[int] = set(keep)
    dead: list[tuple[int, ...]] = []
    for node in reversed(nodes):
        touched = dict.fromkeys(_reads(node, training) + [o for o in node.outs if o >= 0])
        dead.append(tuple(i for i in touched if i not in seen))
        seen.update(touched)
    dead.reverse()
    return dead


class Program:
    """Nodes ready to run. Values not in `keep` leave the environment after their last use; None keeps all."""

    def __init__(self, nodes: Sequence[Node], keep: Iterable[int] | None = None) -> None:
        self._nodes = tuple(nodes)
        self._keep = None if keep is None else frozenset(keep)
        self._calls: dict[tuple[int, bool], list[_Call]] = {}

    def _at(self, batch: int, training: bool) -> list[_Call]:
        calls = self._calls.get((batch, training))
        if calls is None:
            if len(self._calls) >= 8:  # the sizes of a run are few: the usual one and the last, smaller one
                self._calls.clear()
            nodes = self._nodes
            dead: list[tuple[int, ...]] = [()] * len(nodes)
            if self._keep is not None:
                nodes = _of_mode(self._nodes, self._keep, training)
                dead = _last_uses(nodes, self._keep, training)
            calls = [_prepare(n, d, batch, training) for n, d in zip(nodes, dead, strict=True)]
            self._calls[batch, training] = calls
        return calls

    def __call__(self, env: Env, *, batch: int, training: bool, rng: RngKey, device: torch.device = _CPU) -> None:
        """Run all nodes on `env` (value id -> tensor), in place.

        `batch` is the number of samples of this micro-batch. Raises whatever an operator raises.
        """
        ctx = Ctx(training, rng, device)
        for c in self._at(batch, training):
            args = c.args.copy()
            for pos, vid in c.slots:
                args[pos] = env[vid]
            for pos, ids in c.lists:
                args[pos] = [None if i is None else env[i] for i in ids]
            kwargs = c.kwargs
            if c.kwslots:
                kwargs = dict(kwargs)
                for key, vid in c.kwslots:
                    kwargs[key] = env[vid]
            if c.ctx:
                ctx.site = c.site
                out = c.fn(ctx, *args, **kwargs)
            else:
                out = c.fn(*args, **kwargs)
            del args, kwargs
            if c.many:
                for vid, o in zip(c.outs, out, strict=True):
                    if vid >= 0:
                        env[vid] = o
            elif c.outs[0] >= 0:
                env[c.outs[0]] = out
            out = None
            for vid in c.dead:
                env.pop(vid, None)
