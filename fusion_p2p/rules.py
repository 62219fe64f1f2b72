"""How single exported operators are spelled in the opset: one function per rewriting, and the table of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fusion_p2p.errors import CaptureError
from fusion_p2p.ir import ListArg, Ref
from fusion_p2p.opset import OPS

if TYPE_CHECKING:
    from fusion_p2p.canonical import Lowering

LAST = 2**63 - 1  # PyTorch's open end of a slice
LOCAL = ("device", "layout", "pin_memory", "non_blocking")  # a volunteer's own business


def _val(node: Any) -> Any:
    return node.meta["val"]


Rule = Callable[["Lowering", fx.Node], Any]


def _identity(low: Lowering, node: fx.Node) -> Any:
    return low.env[node.args[0]]  # type: ignore[index]


def _to_copy(low: Lowering, node: fx.Node) -> Any:
    source, out = node.args[0], _val(node)
    vid = low.env[source]  # type: ignore[index]
    if out.dtype != _val(source).dtype:
        return low.emit("aten.to.dtype", (Ref(vid), out.dtype), out)
    memory = node.kwargs.get("memory_format")
    if memory in (torch.contiguous_format, torch.channels_last):
        return low.emit("aten.clone", (Ref(vid),), out, {"memory_format": memory})
    return vid


def _shaped(op: str) -> Rule:
    """View and expand, with every -1 resolved."""

    def rule(low: Lowering, node: fx.Node) -> Any:
        out = _val(node)
        return low.emit(op, (node.args[0], list(out.shape)), out)

    return rule


def _fill(low: Lowering, out: torch.Tensor, value: bool | int | float | None) -> Any:
    return low.emit("aten.full", (list(out.shape), value, out.dtype), out)


def _full(value: bool | int | float | None, position: int = -1) -> Rule:
    def rule(low: Lowering, node: fx.Node) -> Any:
        fill: Any = value if value is not None else node.args[position]
        if isinstance(fill, fx.Node):
            raise CaptureError(f"{low.here()}: the fill value is a tensor; use torch.where")
        return _fill(low, _val(node), fill)

    return rule


def _arange(low: Lowering, node: fx.Node) -> Any:
    args = list(node.args)
    start, end, step = (0, args[0], 1) if len(args) == 1 else (*args, 1)[:3]
    if isinstance(end, fx.Node) or isinstance(start, fx.Node):
        raise CaptureError(f"{low.here()}: arange's length depends on data; use a fixed length and a mask")
    return low.emit("aten.arange", (start, end, step, _val(node).dtype), _val(node))


def _slice(op: str, first: int) -> Rule:
    """`first` is the position of `dim`; an open end becomes the size of that dimension."""

    def rule(low: Lowering, node: fx.Node) -> Any:
        args = list(node.args) + [None] * (first + 4 - len(node.args))
        given = dict(zip(("dim", "start", "end", "step"), args[first:], strict=False))
        given |= {k: v for k, v in node.kwargs.items() if k in given}
        dim = given["dim"] or 0
        size = _val(node.args[0]).shape[dim]
        end = size if given["end"] is None or given["end"] == LAST else given["end"]
        out = (*args[:first], dim, given["start"] or 0, end, given["step"] or 1)
        return low.emit(op, out, _val(node))

    return rule


def _renamed(op: str) -> Rule:
    def rule(low: Lowering, node: fx.Node) -> Any:
        args = node.args[: sum(not a.keyword for a in OPS[op].args)]
        kwargs = {k: v for k, v in node.kwargs.items() if k not in LOCAL}
        return low.emit(op, args, _val(node), kwargs)

    return rule


def _first(op: str, pick: Callable[[fx.Node], tuple[Any, ...]]) -> Rule:
    """A native operator whose further results only its backward needs."""

    def rule(low: Lowering, node: fx.Node) -> Any:
        return [low.emit(op, pick(node), _val(node)[0])] + [None] * (len(_val(node)) - 1)

    return rule


def _copy(low: Lowering, node: fx.Node) -> Any:
    """copy(self, src): src in self's shape and dtype."""
    source, out = node.args[1], _val(node)
    vid = low.env[source]  # type: ignore[index]
    if _val(source).dtype != out.dtype:
        vid = low.emit("aten.to.dtype", (Ref(vid), out.dtype), _val(source).to(out.dtype))
    if tuple(_val(source).shape) != tuple(out.shape):
        vid = low.emit("aten.expand", (Ref(vid), list(out.shape)), out)
    return vid


def _index_put(low: Lowering, node: fx.Node) -> Any:
    """x[indices] = values; with a boolean mask and one value it is a masked fill, else its work depends on data."""
    x, indices, values, *rest = node.args
    out = _val(node)
    masks = [i for i in indices if i is not None and _val(i).dtype in (torch.bool, torch.uint8)]  # type: ignore[union-attr]
    if not masks:
        return low.emit("aten.index_put", (x, indices, values, *rest), out)
    mask = _val(masks[0])
    if len(indices) != 1 or _val(values).numel() != 1 or any(rest):  # type: ignore[arg-type]
        raise CaptureError(f"{low.here()}: x[mask] = values takes one number; use torch.where for tensors")
    shape = tuple(mask.shape) + (1,) * (out.dim() - mask.dim())
    wide = Ref(low.emit("aten.reshape", (masks[0], list(shape)), mask.reshape(shape)))
    value = Ref(low.emit("aten.reshape", (values, []), _val(values).reshape(())))
    return low.emit("aten.masked_fill.Tensor", (x, wide, value), out)


def _rnn(op: str, kernel: Any, pair: bool) -> Rule:
    """A recurrent network; with dropout layer by layer, ours between (PyTorch's draws on (time, sample, feature)).

    `pair`: the state is (h, c). Both modes are spelled alike, so that they share their nodes.
    """

    def rule(low: Lowering, node: fx.Node) -> Any:
        given: Any = node.args
        x, hx, params, biases, layers, p, train, both, first = given
        states: Any = list(hx) if pair else [hx]
        if len(params) != layers * (4 if biases else 2) * (2 if both else 1):
            raise CaptureError(f"{low.here()}: proj_size is not supported; put a linear layer after the LSTM")
        if p == 0.0 or layers == 1:
            return low.emit(op, ([x], states, list(params), biases, layers, both, first), _val(node))
        per, sides = len(params) // layers, 2 if both else 1
        value: Any = _val(x)
        vid = low.env[x]
        if first:
            value = value.transpose(0, 1)
            vid = low.emit("aten.transpose.int", (Ref(vid), 0, 1), value)
        ends: list[list[tuple[int, Any]]] = []
        for k in range(layers):
            weights = list(params)[k * per : (k + 1) * per]
            part = [_val(s)[k * sides : (k + 1) * sides] for s in states]
            cut = [
                Ref(low.emit("aten.slice.Tensor", (s, 0, k * sides, (k + 1) * sides, 1), v))
                for s, v in zip(states, part, strict=True)
            ]
            out = kernel(
                value, part if pair else part[0], [_val(w) for w in weights], biases, 1, 0.0, train, both, False
            )
            ids = low.emit(op, (ListArg((Ref(vid),)), ListArg(tuple(cut)), weights, biases, 1, both, False), out)
            vid, value = ids[0], out[0]
            ends.append(list(zip(ids[1:], out[1:], strict=True)))
            if train and k < layers - 1:
                vid = low.emit("fusion.dropout", (Ref(vid), p), value)
        if first:
            vid = low.emit("aten.transpose.int", (Ref(vid), 0, 1), _val(node)[0])
        last = [
            low.emit("aten.cat", (ListArg(tuple(Ref(i) for i, _ in column)), 0), _val(node)[1 + n])
            for n, column in enumerate(zip(*ends, strict=True))
        ]
        return [vid, *last]

    return rule


def _batch_norm(low: Lowering, node: fx.Node) -> Any:
    x, weight, bias, mean, var, training, momentum, eps = node.args
    out = _val(node)
    if not training:
        return [low.emit("fusion.batch_norm_frozen", (x, weight, bias, mean, var, eps), out[0])] + [None] * 4
    args = (x, weight, bias, mean, var, momentum, eps)
    y, new_mean, new_var = low.emit("fusion.batch_norm", args, (out[0], out[3], out[4]))
    return [y, None, None, new_mean, new_var]


def _batch_norm_frozen(low: Lowering, node: fx.Node) -> Any:
    x, weight, bias, mean, var, _momentum, eps = node.args
    return [low.emit("fusion.batch_norm_frozen", (x, weight, bias, mean, var, eps), _val(node)[0]), None, None]


def _batch_norm_local(low: Lowering, node: fx.Node) -> Any:
    x, weight, bias, _training, _momentum, eps = node.args
    return [low.emit("fusion.batch_norm_local", (x, weight, bias, eps), _val(node)[0]), None, None]


def _frozen_norm(low: Lowering, node: fx.Node) -> Any:
    x, weight, bias, mean, var, training, _momentum, eps, *_ = node.args
    if training:
        raise CaptureError(f"{low.here()}: batch norm updates its statistics outside the graph")
    return low.emit("fusion.batch_norm_frozen", (x, weight, bias, mean, var, eps), _val(node))


def _random(op: str) -> Rule:
    def rule(low: Lowering, node: fx.Node) -> Any:
        out = _val(node)
        return low.emit(op, (list(out.shape), out.dtype), out)

    return rule


def _randint(skip: int) -> Rule:
    """`skip` arguments (a tensor to take the shape from) come before low and high."""

    def rule(low: Lowering, node: fx.Node) -> Any:
        bounds = [a for a in node.args[skip:] if isinstance(a, int)]
        start, end = (0, bounds[0]) if len(bounds) == 1 else bounds[:2]
        return low.emit("fusion.randint", (start, end, list(_val(node).shape), _val(node).dtype), _val(node))

    return rule


def _normal(low: Lowering, node: fx.Node) -> Any:
    """normal_(mean, std) and torch.normal(mean, std, size): standard normal, scaled and moved."""
    numbers = [a for a in (*node.args, node.kwargs.get("mean"), node.kwargs.get("std")) if isinstance(a, int | float)]
    mean, std = (*numbers, *(0.0, 1.0)[len(numbers) :])[:2]
    out = _val(node)
    drawn = low.emit("fusion.randn", (list(out.shape), out.dtype), out)
    return low.emit("aten.add.Scalar", (Ref(low.emit("aten.mul.Scalar", (Ref(drawn), std), out)), mean), out)


def _uniform(low: Lowering, node: fx.Node) -> Any:
    start, end = (*node.args[1:], *(0.0, 1.0)[len(node.args) - 1 :])[:2]
    out = _val(node)
    drawn = low.emit("fusion.rand", (list(out.shape), out.dtype), out)
    scaled = low.emit("aten.mul.Scalar", (Ref(drawn), end - start), out)  # type: ignore[operator]
    return low.emit("aten.add.Scalar", (Ref(scaled), start), out)


def _exponential(low: Lowering, node: fx.Node) -> Any:
    """-log(1 - u) / rate."""
    rate = node.args[1] if len(node.args) > 1 else node.kwargs.get("lambd", 1.0)
    out = _val(node)
    drawn = low.emit("fusion.rand", (list(out.shape), out.dtype), out)
    log = low.emit("aten.log", (Ref(low.emit("aten.rsub.Scalar", (Ref(drawn), 1.0), out)),), out)
    return low.emit("aten.div.Scalar", (Ref(log), -rate), out)  # type: ignore[operator]


def _opaque_sdpa(low: Lowering, node: fx.Node) -> Any:
    return low.emit("fusion.sdpa", node.args, _val(node))


RULES: dict[str, Rule] = {
    **{f"aten.{n}": _identity for n in ("alias", "lift_fresh_copy", "lift_fresh", "lift", "_conj_physical_noop")},
    **{f"aten.{n}": _shaped("aten.reshape") for n in ("view", "_unsafe_view", "reshape", "_reshape_alias")},
    "aten.expand": _shaped("aten.expand"),
    "aten._to_copy": _to_copy,
    "aten.copy": _copy,
    "aten.arange": _arange,
    "aten.arange.start": _arange,
    "aten.arange.start_step": _arange,
    **{f"aten.{n}": _full(0) for n in ("zeros", "zeros_like", "new_zeros", "empty.memory_format", "empty_like")},
    **{f"aten.{n}": _full(0) for n in ("new_empty", "empty_strided", "new_empty_strided", "empty_permuted")},
    **{f"aten.{n}": _full(1) for n in ("ones", "ones_like", "new_ones")},
    **{f"aten.{n}": _full(None) for n in ("full", "full_like", "new_full", "fill.Scalar")},
    "aten.lstm.input": _rnn("fusion.lstm", torch.ops.aten.lstm.input, True),
    "aten.gru.input": _rnn("fusion.gru", torch.ops.aten.gru.input, False),
    "aten.rnn_tanh.input": _rnn("fusion.rnn_tanh", torch.ops.aten.rnn_tanh.input, False),
    "aten.rnn_relu.input": _rnn("fusion.rnn_relu", torch.ops.aten.rnn_relu.input, False),
    "aten.index_put": _index_put,
    "aten.slice.Tensor": _slice("aten.slice.Tensor", 1),
    "aten.slice_scatter": _slice("aten.slice_scatter", 2),
    "aten.__and__.Tensor": _renamed("aten.bitwise_and.Tensor"),
    "aten.__and__.Scalar": _renamed("aten.bitwise_and.Scalar"),
    "aten.__or__.Tensor": _renamed("aten.bitwise_or.Tensor"),
    "aten.__or__.Scalar": _renamed("aten.bitwise_or.Scalar"),
    "aten.__xor__.Tensor": _renamed("aten.bitwise_xor.Tensor"),
    "aten._fft_c2c": _renamed("aten.fft_c2c"),
    "aten._fft_c2r": _renamed("aten.fft_c2r"),
    "aten._fft_r2c": _renamed("aten.fft_r2c"),
    "aten.native_layer_norm": _first("aten.layer_norm", lambda n: n.args[:5]),
    "aten.native_group_norm": _first(
        "aten.group_norm", lambda n: (n.args[0], n.args[6], n.args[1], n.args[2], n.args[7])
    ),
    "aten.native_dropout": _first("fusion.dropout", lambda n: (n.args[0], n.args[1])),
    "aten._native_batch_norm_legit_functional": _batch_norm,
    "aten._native_batch_norm_legit_no_training": _batch_norm_frozen,
    "aten._native_batch_norm_legit.no_stats": _batch_norm_local,
    "aten.batch_norm": _frozen_norm,
    "aten.rand": _random("fusion.rand"),
    "aten.rand_like": _random("fusion.rand"),
    "aten.randn": _random("fusion.randn"),
    "aten.randn_like": _random("fusion.randn"),
    "aten.randint": _randint(0),
    "aten.randint.low": _randint(0),
    "aten.randint_like": _randint(1),
    "aten.randint_like.low_dtype": _randint(1),
    "aten.normal_functional": _normal,
    "aten.normal.float_float": _normal,
    "aten.uniform": _uniform,
    "aten.exponential": _exponential,
    "aten.bernoulli": _renamed("fusion.bernoulli"),
    "aten.bernoulli.p": _renamed("fusion.bernoulli_like"),
    "fusion_p2p.detach": _renamed("fusion.detach"),
    "fusion_p2p.dropout": _renamed("fusion.dropout"),
    "fusion_p2p.alpha_dropout": _renamed("fusion.alpha_dropout"),
    "fusion_p2p.feature_dropout": _renamed("fusion.feature_dropout"),
    "fusion_p2p.feature_alpha_dropout": _renamed("fusion.feature_alpha_dropout"),
    "fusion_p2p.sdpa": _opaque_sdpa,
}
