"""Before decomposition: put our own operators where PyTorch's would lose the mode or the site.

An exported graph before decomposition still says `aten.dropout`; after it, only the arithmetic of train mode is left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from fusion_p2p import canonical

_LIB: Any = torch.library.Library("fusion_p2p", "DEF")  # type: ignore[no-untyped-call]
_DRAWS = (torch.Tag.nondeterministic_seeded,)  # so that an unread draw keeps its place in the order
_UNARY = ["dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"]


def _define() -> None:
    """Opaque operators that only fake tensors ever run through (their values are never computed here)."""
    for name in _UNARY:
        _LIB.define(f"{name}(Tensor x, float p) -> Tensor", tags=_DRAWS)
        _LIB.impl(name, lambda x, p: torch.empty_like(x), "CompositeExplicitAutograd")
    _LIB.define("detach(Tensor x) -> Tensor")
    _LIB.impl("detach", lambda x: torch.empty_like(x), "CompositeExplicitAutograd")
    _LIB.define(
        "sdpa(Tensor q, Tensor k, Tensor v, Tensor? mask, float p, bool is_causal, float? scale, bool gqa) -> Tensor",
        tags=_DRAWS,
    )
    _LIB.impl(
        "sdpa",
        lambda q, k, v, mask, p, is_causal, scale, gqa: q.new_empty((*q.shape[:-1], v.shape[-1])),
        "CompositeExplicitAutograd",
    )


_define()


def _replace(graph: fx.Graph, node: fx.Node, target: Any, args: tuple[Any, ...]) -> None:
    with graph.inserting_before(node):
        new = graph.call_function(target, args)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)


_DROPOUTS = {getattr(torch.ops.aten, n).default: getattr(torch.ops.fusion_p2p, n).default for n in _UNARY}
_SDPA = torch.ops.aten.scaled_dot_product_attention.default


def _sdpa_args(node: fx.Node) -> tuple[Any, ...]:
    q, k, v, *rest = node.args
    names = ("attn_mask", "dropout_p", "is_causal")
    given: dict[str, Any] = dict(zip(names, rest, strict=False)) | dict(node.kwargs)
    return (
        *(q, k, v, given.get("attn_mask")),
        *(given.get("dropout_p", 0.0), given.get("is_causal", False)),
        *(given.get("scale"), given.get("enable_gqa", False)),
    )


def _rewrite(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in _DROPOUTS:
            x, p, train = node.args
            if train and p > 0.0:
                _replace(graph, node, _DROPOUTS[node.target], (x, float(p)))
            else:
                node.replace_all_uses_with(x)
                graph.erase_node(node)
        elif node.target is _SDPA and _sdpa_args(node)[4] > 0.0:
            _replace(graph, node, torch.ops.fusion_p2p.sdpa.default, _sdpa_args(node))
        elif node.target in (torch.ops.aten.detach.default, torch.ops.aten.detach_.default):
            _replace(graph, node, torch.ops.fusion_p2p.detach.default, (node.args[0],))


_GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled


def _detach_outputs(graph: fx.Graph) -> None:
    out = next(n for n in graph.nodes if n.op == "output")
    with graph.inserting_before(out):
        new = []
        for value in out.args[0]:
            if isinstance(value, fx.Node):
                detached = graph.call_function(torch.ops.fusion_p2p.detach.default, (value,))
                detached.meta = dict(value.meta)
                value = detached
            new.append(value)
    out.args = (tuple(new),)


def rewrite(module: fx.GraphModule) -> None:
    """Make dropout, attention dropout and detach opaque, here and in every nested region, in place.

    Decomposition inlines regions but forgets that they ran without gradients, so their outputs are detached here.
    """
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target is _GRAD and node.args[0] is False:
            body = getattr(module, node.args[1].target)
            _detach_outputs(body.graph)
            body.recompile()
    for _, child in module.named_children():
        if isinstance(child, fx.GraphModule):
            rewrite(child)
    _rewrite(module.graph)
    module.recompile()


def decompose(program: ExportedProgram) -> ExportedProgram:
    """Functional form, decomposing only operators that the opset lacks, until none of them can be taken apart."""
    program = program.run_decompositions({})
    core = torch._decomp.core_aten_decompositions()
    tried: set[Any] = set()
    while True:
        table: dict[Any, Callable[..., Any]] = {}
        for op in canonical.unknown(program.graph):
            if op in tried or not isinstance(op, torch._ops.OpOverload):
                continue
            tried.add(op)
            if op in core:
                table[op] = core[op]
            elif op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
                table[op] = op.decompose
        if not table:
            return program
        program = program.run_decompositions(table)
