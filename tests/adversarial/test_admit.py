"""A volunteer refuses every hostile OP-DAG before it costs anything, and never dies of one."""

from __future__ import annotations

import itertools
import random
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fusion_p2p.admit import Caps, admit
from fusion_p2p.errors import AdmissionError
from fusion_p2p.interp import Program
from fusion_p2p.ir import OpDag
from fusion_p2p.opset import OPS, dtype_of
from fusion_p2p.seeded import RngKey
from tests.adversarial.coverage_fuzz import runs_of
from tests.adversarial.hostile_dags import HOSTILE, encode, golden
from tests.tiny_gpt2 import GOLDEN


def test_at_least_forty_kinds() -> None:
    assert len(HOSTILE) >= 40


@pytest.mark.parametrize("name", HOSTILE)
def test_refused_for_its_reason(name: str) -> None:
    build, reason = HOSTILE[name]
    with pytest.raises(AdmissionError) as caught:
        admit(build())
    text = str(caught.value)
    assert reason in text
    assert len(text) < 400 and "\n" not in text and text.isprintable()


@pytest.mark.timeout(400)
def test_peak_memory_of_all_of_them() -> None:
    """One process, PyTorch included, stays under 400 MB, as the kernel counts it."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.adversarial.hostile_dags"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        said = list(itertools.takewhile(lambda line: line != "done\n", process.stdout))
        status = Path(f"/proc/{process.pid}/status").read_text()
        process.stdin.close()
    assert not said and process.returncode == 0
    (peak,) = re.findall(r"VmHWM:\s*(\d+) kB", status)
    assert 100 < int(peak) // 1024 < 400


def test_golden_passes_and_respects_caps() -> None:
    data = GOLDEN.read_bytes()
    assert admit(data).to_bytes() == data
    for caps in (
        Caps(nodes=20),
        Caps(data_bytes=100),
        Caps(value_bytes=1000),
        Caps(total_bytes=10_000),
        Caps(flops=10_000),
        Caps(batch=10**9),
    ):
        with pytest.raises(AdmissionError):
            admit(data, caps=caps)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=300) | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(msgspec.json.encode))
def test_fuzz_bytes(data: bytes) -> None:
    with pytest.raises(AdmissionError):
        admit(data)


_NUMBERS = [None, True, -1, 0, 1, 2, 3, 2**31, 2**53, -(2**53), 2**63, 0.5, -1.0, 1e308]
_WORDS = [
    "",
    "v",
    "inf",
    "aten.mm",
    [],
    {},
    ["v", 0],
    ["v", 5],
    ["t", "bool"],
    ["e", "inf"],
    ["l", []],
    ["l", [["v", 1]]],
]
_SIZES = [["b", 1, 0], ["b", 2**40, 0], ["b", -1, 3]]
_LEAF = st.sampled_from(_NUMBERS + _WORDS + _SIZES)


def _mutate(value: object, rng: random.Random, leaf: object) -> object:
    """Replace one place of a JSON tree, reached by a random walk, by `leaf`."""
    if isinstance(value, list) and value and rng.random() < 0.93:
        i = rng.randrange(len(value))
        return [*value[:i], _mutate(value[i], rng, leaf), *value[i + 1 :]]
    if isinstance(value, dict) and value and rng.random() < 0.95:
        key = rng.choice(sorted(value))
        return value | {key: _mutate(value[key], rng, leaf)}
    return leaf


def _run(dag: OpDag) -> None:
    """What an executor would do: the forward, on small tensors of the declared shapes."""
    env = {}
    for i in dag.inputs:
        spec = dag.values[i.value]
        env[i.value] = torch.zeros(spec.at(2), dtype=dtype_of(spec.dtype))
    for p in dag.params:
        env[p.value] = torch.ones(dag.values[p.value].at(2))
    Program(dag.nodes, [dag.loss])(env, batch=2, training=True, rng=RngKey())
    assert env[dag.loss].shape == ()


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(0, 2**32), _LEAF), min_size=1, max_size=3))
def test_fuzz_changed_golden(changes: list[tuple[int, object]]) -> None:
    """A changed graph is refused, or runs as declared: what admission lets through does no harm."""
    graph: object = golden()
    for seed, leaf in changes:
        graph = _mutate(graph, random.Random(seed), leaf)
    try:
        dag = admit(encode(graph) if isinstance(graph, dict) else msgspec.json.encode(graph))
    except AdmissionError:
        return
    _run(dag)


def test_opset_holds_nothing_in_place_random_or_from_outside() -> None:
    """The table itself: functional schemas only, no aliasing writes, no strings but reviewed enums."""
    fixed = {"aten.index.Tensor", "aten.one_hot"}  # admission takes integer indices and a given number of classes only
    for op in OPS.values():
        if op.ctx or op.name.startswith("fusion."):
            continue
        schema = op.fn._schema
        assert not schema.is_mutable, op.name
        assert torch.Tag.nondeterministic_seeded not in op.fn.tags or op.name == "aten.scaled_dot_product_attention"
        assert torch.Tag.dynamic_output_shape not in op.fn.tags or op.name in fixed, op.name
        types = {a.name: str(a.type) for a in schema.arguments}
        for a in op.args:
            assert a.name in types, (op.name, a.name)
            if "str" in types[a.name]:
                assert a.enums, (op.name, a.name)
            assert not any(word in types[a.name] for word in ("Device", "Generator", "Storage", "Layout"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seconds", [20, pytest.param(120, marks=pytest.mark.soak)])
def test_fuzz_guided_by_coverage(tmp_path: Path, seconds: int) -> None:
    assert runs_of("atheris_opdag", tmp_path, seconds=seconds, max_bytes=40_000) > 10 * seconds
