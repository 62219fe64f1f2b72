"""OP-DAGs that a stranger might send. `python -m tests.adversarial.hostile_dags` admits them all in one process.

Each builder changes the golden GPT-2 (as plain JSON data, so that it can also hold what our types cannot) or writes a
small graph of its own.
"""

from __future__ import annotations

import base64
import contextlib
import json
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from fusion_p2p.admit import Caps, admit
from fusion_p2p.errors import AdmissionError
from fusion_p2p.ir import OpDag
from fusion_p2p.ops_table import OPSET
from tests.tiny_gpt2 import GOLDEN

Graph = dict[str, Any]
HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {}


def golden() -> Graph:
    return json.loads(GOLDEN.read_bytes())


def encode(graph: Graph) -> bytes:
    """In our canonical form where our types can hold it, so that only what was changed is at fault."""
    if graph.keys() <= set(OpDag.__struct_fields__):
        with contextlib.suppress(msgspec.ValidationError):
            return msgspec.convert(graph, OpDag).to_bytes()
    return msgspec.json.encode(graph)


def hostile(reason: str) -> Callable[[Callable[[], bytes | Graph]], Callable[[], bytes | Graph]]:
    """Register a builder; `reason` is a part of what the refusal must say."""

    def register(build: Callable[[], bytes | Graph]) -> Callable[[], bytes | Graph]:
        def encoded() -> bytes:
            made = build()
            return made if isinstance(made, bytes) else encode(made)

        HOSTILE[build.__name__] = (encoded, reason)
        return build

    return register


def small(
    nodes: list[Any], values: list[Any], *, inputs: int = 1, loss: int | None = None, consts: list[Any] | None = None
) -> Graph:
    """A graph of `inputs` inputs (values 0..), the nodes, and the last value as loss."""
    return {
        "version": 1,
        "opset": OPSET,
        "inputs": [{"name": f"x{i}", "value": i, "vmin": None, "vmax": None} for i in range(inputs)],
        "params": [],
        "buffers": [],
        "consts": consts or [],
        "values": values,
        "nodes": nodes,
        "loss": len(values) - 1 if loss is None else loss,
        "outputs": {},
        "aliases": {},
    }


def chain(
    op: str, args: list[Any], shape: list[Any], result: list[Any], dtype: str = "float32", **kwargs: Any
) -> Graph:
    """One hostile node from x0, then its mean as loss."""
    return small(
        [[op, [["v", 0], *args], kwargs, [1], 0], ["aten.mean", [["v", 1]], {}, [2], 1]],
        [[shape, "float32"], [result, dtype], [[], "float32"]],
    )


def sized(nodes: list[Any], values: list[Any], **more: Any) -> Graph:
    return small(
        [*nodes, ["aten.mean", [["v", len(values) - 1]], {}, [len(values)], 10**6]], [*values, [[], "float32"]], **more
    )


# -- bytes ------------------------------------------------------------------------------------------------------------


@hostile("truncated")
def empty() -> bytes:
    return b""


@hostile("malformed")
def not_json() -> bytes:
    return b"\x80\x04\x95\x0e\x00\x00\x00cos\nsystem\n."


@hostile("over the cap")
def too_many_bytes() -> bytes:
    return b" " * ((8 << 20) + 1)


@hostile("does not decode")
def deeply_nested() -> bytes:
    return b"[" * 4_000_000


@hostile("recursion")
def deeply_nested_argument() -> bytes:
    deep = b'["l",[' * 500_000 + b"]]" * 500_000
    return encode(golden()).replace(b'"nodes":[[', b'"nodes":[["aten.relu",[' + deep + b"],{},[0],0],[", 1)


@hostile("does not decode")
def long_flat_list() -> bytes:
    return encode(golden()).replace(b'"nodes":[', b'"nodes":[' + b"[]," * 2_000_000, 1)


@hostile("values; the cap")
def many_tiny_values() -> Graph:
    g = golden()
    g["values"] += [[[], "bool"]] * 300_000
    return g


@hostile("UTF-8")
def invalid_utf8_name() -> bytes:
    return encode(golden()).replace(b"input_ids", b"input_\xff\xfes", 1)


@hostile("canonical form")
def unknown_field() -> Graph:
    return golden() | {"__reduce__": ["os.system", "true"]}


@hostile("canonical form")
def repeated_field() -> bytes:
    return encode(golden())[:-1] + b',"loss":0}'


@hostile("trailing")
def trailing_bytes() -> bytes:
    return encode(golden()) + b"[]"


@hostile("canonical form")
def not_canonical() -> bytes:
    return encode(golden()).replace(b",", b", ", 1)


@hostile("out of range")
def float_overflow() -> bytes:
    return encode(golden()).replace(b"0.044715", b"1e999", 1)


@hostile("malformed")
def nan_literal() -> bytes:
    return encode(golden()).replace(b"0.044715", b"NaN", 1)


@hostile("'other' does not fit")
def huge_integer() -> bytes:
    return encode(golden()).replace(b"0.044715", b"9" * 4000, 1)


@hostile("missing required")
def missing_field() -> Graph:
    g = golden()
    del g["nodes"]
    return g


@hostile("Expected `int`")
def wrong_type() -> Graph:
    return golden() | {"loss": "7"}


# -- version and roles ------------------------------------------------------------------------------------------------


@hostile("version 2")
def other_version() -> Graph:
    return golden() | {"version": 2}


@hostile("fusion-99")
def other_opset() -> Graph:
    return golden() | {"opset": "fusion-99"}


@hostile("the loss has shape")
def loss_is_a_matrix() -> Graph:
    g = golden()
    return g | {"loss": g["params"][0]["value"]}


@hostile("nothing defines")
def loss_out_of_range() -> Graph:
    return golden() | {"loss": 10**9}


@hostile("nothing defines")
def negative_loss() -> Graph:
    return golden() | {"loss": -1}


@hostile("trainable but int64")
def integer_parameter() -> Graph:
    g = golden()
    g["values"][g["params"][0]["value"]][1] = "int64"
    return g


@hostile("depends on the batch")
def parameter_grows_with_batch() -> Graph:
    g = golden()
    g["values"][g["params"][0]["value"]][0][0] = ["b", 16, 0]
    return g


@hostile("used twice")
def name_twice() -> Graph:
    g = golden()
    g["params"][1]["name"] = g["params"][0]["name"]
    return g


@hostile("printable")
def name_with_terminal_codes() -> Graph:
    g = golden()
    g["params"][0]["name"] = "\x1b[2Jweight"
    return g


@hostile("printable")
def endless_name() -> Graph:
    g = golden()
    g["params"][0]["name"] = "a" * 100_000
    return g


@hostile("no parameter or buffer")
def alias_to_nothing() -> Graph:
    return golden() | {"aliases": {"lm_head.weight": "no.such.weight"}}


@hostile("indexes 0..31")
def range_too_wide() -> Graph:
    g = golden()
    g["inputs"][0]["vmax"] = 10**6
    return g


@hostile("indexes 0..31")
def range_missing() -> Graph:
    g = golden()
    g["inputs"][0]["vmin"] = g["inputs"][0]["vmax"] = None
    return g


@hostile("update of buffer")
def buffer_update_of_other_shape() -> Graph:
    g = small(
        [["aten.add.Tensor", [["v", 0], ["v", 1]], {}, [2], 0], ["aten.mean", [["v", 2]], {}, [3], 1]],
        [[[4, 4], "float32"], [[4], "float32"], [[4, 4], "float32"], [[], "float32"]],
    )
    g["buffers"] = [{"name": "b", "value": 1, "update": 2, "persistent": True}]
    return g


# -- single assignment ------------------------------------------------------------------------------------------------


@hostile("before it is defined")
def future_reference() -> Graph:
    g = golden()
    g["nodes"][0][1][0] = ["v", g["loss"]]
    return g


@hostile("before it is defined")
def self_reference() -> Graph:
    return small([["aten.relu", [["v", 1]], {}, [1], 0]], [[[], "float32"], [[], "float32"]])


@hostile("a second time")
def defined_twice() -> Graph:
    g = golden()
    g["nodes"][1][3] = g["nodes"][0][3]
    return g


@hostile("a second time")
def overwrites_a_weight() -> Graph:
    g = golden()
    g["nodes"][0][3] = [g["params"][0]["value"]]
    return g


@hostile("before it is defined")
def reference_out_of_range() -> Graph:
    g = golden()
    g["nodes"][0][1][0] = ["v", 2**40]
    return g


@hostile("before it is defined")
def negative_reference() -> Graph:
    g = golden()
    g["nodes"][0][1][0] = ["v", -1]
    return g


@hostile("0 results")
def no_results() -> Graph:
    g = golden()
    g["nodes"][0][3] = []
    return g


@hostile("has site")
def repeated_site() -> Graph:
    g = golden()
    seeded = [n for n in g["nodes"] if n[0].startswith("fusion.")]
    seeded[1][4] = seeded[0][4]
    return g


# -- operators and arguments ------------------------------------------------------------------------------------------

for name in (
    *("aten.add_.Tensor", "aten.nonzero", "aten.empty.memory_format", "aten.as_strided", "aten.from_file"),
    *("aten.to.device", "aten.rand.generator", "aten.set_.source_Storage", "aten.einsum", "aten.masked_select"),
    *("os.system", "aten.__class__", "builtins.eval", "fusion.OWN", "prim.device", "aten.linear.out", ""),
):

    def _operator(name: str = name) -> bytes:
        return encode(chain(name, [], [4], [4]))

    HOSTILE[f"operator_{name or 'without_name'}"] = (_operator, "not in opset")


@hostile("does not fit I")
def argument_of_wrong_kind() -> Graph:
    return chain("aten.transpose.int", [["t", "float32"], 1], [4, 4], [4, 4])


@hostile("does not fit E")
def string_argument() -> Graph:
    return chain("aten.gelu", [], [4], [4], approximate=["e", "/etc/passwd"])


@hostile("takes 1 arguments")
def too_many_arguments() -> Graph:
    return chain("aten.relu", [1, 2, 3], [4], [4])


@hostile("no free argument")
def unknown_keyword() -> Graph:
    return chain("aten.relu", [], [4], [4], out=["v", 0])


@hostile("no free argument")
def keyword_twice() -> Graph:
    return chain("aten.softmax.int", [0], [4], [4], dim=0)


@hostile("lacks argument")
def missing_argument() -> Graph:
    return chain("aten.transpose.int", [0], [4, 4], [4, 4])


@hostile("does not fit")
def not_a_number() -> Graph:
    return chain("aten.mul.Tensor", [["e", "nan"]], [4], [4])


@hostile("does not fit")
def infinity_where_not_reviewed() -> Graph:
    return chain("aten.mul.Tensor", [["e", "inf"]], [4], [4])


@hostile("probability")
def dropout_of_minus_one() -> Graph:
    return chain("fusion.dropout", [-1.0], [4], [4])


@hostile("list inside a list")
def list_in_a_list() -> Graph:
    return chain("aten.reshape", [["l", [["l", [4]]]]], [4], [4])


@hostile("must be integers")
def boolean_mask_index() -> Graph:
    return sized(
        [
            ["aten.gt.Scalar", [["v", 0], 0], {}, [1], 0],
            ["aten.index.Tensor", [["v", 0], ["l", [["v", 1]]]], {}, [2], 1],
        ],
        [[[4], "float32"], [[4], "bool"], [[4], "float32"]],
    )


@hostile("do not fit its layers")
def recurrent_layers_without_weights() -> Graph:
    x = ["l", [["v", 0]]]
    return chain("fusion.gru", [], [4, 4, 4], [4, 4, 4]) | {
        "nodes": [
            ["fusion.gru", [x, x, ["l", [["v", 0]] * 4], True, 10**6, False, False], {}, [1, -1], 0],
            ["aten.mean", [["v", 1]], {}, [2], 1],
        ]
    }


@hostile("stride must be")
def stride_of_zero() -> Graph:
    return chain("aten.max_pool2d", [["l", [2, 2]], ["l", [0, 0]]], [1, 1, 8, 8], [1, 1, 4, 4])


@hostile("num_groups must be")
def no_groups() -> Graph:
    return chain("aten.group_norm", [0], [2, 4, 4], [2, 4, 4])


@hostile("gives 10000000 results")
def ten_million_slices() -> Graph:
    return chain("aten.unbind.int", [0], [10_000_000], [])


@hostile("gives 100 results")
def split_with_lying_count() -> Graph:
    return chain("aten.split.Tensor", [1, 0], [100], [1])


@hostile("does not fit")
def list_of_a_million() -> Graph:
    return chain("aten.repeat", [["l", [1] * 1_000_000]], [4], [4])


# -- sizes ------------------------------------------------------------------------------------------------------------


@hostile("over the cap")
def huge_declared_value() -> Graph:
    return chain("aten.expand", [["l", [2**40, 4]]], [4], [2**40, 4])


@hostile("over the cap")
def product_overflows() -> Graph:
    return chain("aten.expand", [["l", [2**33, 2**33, 4]]], [4], [2**33, 2**33, 4])


@hostile("over the cap")
def zero_times_huge() -> Graph:
    return chain("aten.reshape", [["l", [0, 2**50]]], [0, 4], [0, 2**50])


@hostile("has shape")
def negative_dimension() -> Graph:
    return chain("aten.reshape", [["l", [-4]]], [4], [-4])


@hostile("has shape")
def negative_for_small_batches() -> Graph:
    return chain("aten.relu", [], [["b", 1, -2]], [["b", 1, -2]])


@hostile("over the cap")
def explodes_with_the_batch() -> Graph:
    return chain("aten.relu", [], [["b", 2**40, 0]], [["b", 2**40, 0]])


@hostile("64 dimensions")
def sixty_four_dimensions() -> Graph:
    return chain("aten.relu", [], [1] * 64, [1] * 64)


@hostile("declared")
def lying_shape() -> Graph:
    return chain("aten.repeat", [["l", [1000, 1000]]], [1000, 1000], [1, 1])


@hostile("declared")
def lying_dtype() -> Graph:
    return chain("aten.relu", [], [4], [4], dtype="float64")


@hostile("declared")
def lying_in_the_golden() -> Graph:
    g = golden()
    node = next(n for n in g["nodes"] if n[0] == "aten.addmm")
    g["values"][node[3][0]][0][-1] += 1
    return g


@hostile("batch 3")
def lies_only_for_other_batches() -> Graph:
    return chain("aten.relu", [], [["b", 1, 0], 4], [2, 4])


@hostile("the graph needs")
def many_large_values() -> Graph:
    n = 2**30
    nodes = [["aten.add.Tensor", [["v", i], ["v", i]], {}, [i + 1], i] for i in range(200)]
    return sized(nodes, [[[n], "float32"]] * 201)


@hostile("FLOPs")
def compute_bomb() -> Graph:
    n = 15_000
    nodes = [["aten.mm", [["v", i], ["v", 0]], {}, [i + 1], i] for i in range(200)]
    return sized(nodes, [[[n, n], "float32"]] * 201)


@hostile("FLOPs")
def pooling_bomb() -> Graph:
    return chain(
        "aten.avg_pool2d", [["l", [20_000, 20_000]], ["l", [1, 1]]], [1, 1, 40_000, 40_000], [1, 1, 20_001, 20_001]
    )


@hostile("workspace")
def workspace_bomb() -> Graph:
    q = ["v", 0]
    return chain("aten.scaled_dot_product_attention", [q, q], [1, 1, 2**20, 64], [1, 1, 2**20, 64])


@hostile("workspace")
def broadcast_bomb() -> Graph:
    return small(
        [["aten.matmul", [["v", 0], ["v", 1]], {}, [2], 0], ["aten.mean", [["v", 2]], {}, [3], 1]],
        [[[100_000, 1, 1000], "float32"], [[1000, 1000], "float32"], [[100_000, 1, 1000], "float32"], [[], "float32"]],
        inputs=2,
    )


# -- constants --------------------------------------------------------------------------------------------------------


def _constant(data: bytes, shape: list[Any], dtype: str) -> Graph:
    return small(
        [["aten.to.dtype", [["v", 1], ["t", "float32"]], {}, [2], 0], ["aten.mean", [["v", 2]], {}, [3], 1]],
        [[[4], "float32"], [shape, dtype], [shape, "float32"], [[], "float32"]],
        consts=[{"value": 1, "data": base64.b64encode(data).decode()}],
    )


@hostile("declared 8000")
def constant_too_short() -> Graph:
    return _constant(b"\0" * 8, [1000], "int64")


@hostile("constants take more")
def constant_too_large() -> Graph:
    return _constant(b"\0" * (5 << 20), [5 << 20], "uint8")


@hostile("NaN")
def constant_with_nan() -> Graph:
    return _constant(b"\0\0\xc0\x7f" * 4, [4], "float32")


@hostile("other than 0 and 1")
def boolean_constant_of_sevens() -> Graph:
    return _constant(b"\7" * 4, [4], "bool")


def main() -> None:
    """Admit all of them; a line for each that is not refused for its reason, then "done"; ends with its stdin."""
    for name, (build, reason) in HOSTILE.items():
        try:
            admit(build(), caps=Caps())
        except AdmissionError as error:
            if reason not in str(error):
                print(f"{name}: refused for another reason: {str(error)[:150]}")
        else:
            print(f"{name}: ADMITTED")
    print("done", flush=True)
    sys.stdin.read()  # whoever measures this process looks at it now


if __name__ == "__main__":
    main()
