"""Atoms and stage programs: cuts, edges, owners, what is computed again, what is refused."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from fusion_p2p.errors import InputError
from fusion_p2p.flow import analyse
from fusion_p2p.split import StageProgram, split
from fusion_p2p.workload import atoms
from tests.unit import stage_models as models
from tests.unit.stage_models import Case

CASES = {"gpt2": models.gpt2, "resnet": models.resnet, "skip": models.skip_net}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    made: Case = CASES[request.param]()
    return made


def test_atoms_cover_every_live_node_once_in_order(case: Case) -> None:
    dag = case.captured.opdag
    nodes = [n for a in atoms(dag) for n in a.nodes]
    assert nodes == list(analyse(dag).order)
    owned = [name for a in atoms(dag) for name in a.owned]
    assert len(owned) == len(set(owned))
    assert set(owned) <= {p.name for p in dag.params}


def test_atom_figures_grow_with_the_batch(case: Case) -> None:
    dag = case.captured.opdag
    one, four = atoms(dag, 1), atoms(dag, 4)
    assert [a.nodes for a in one] == [a.nodes for a in four]
    assert all(a.forward_flops <= b.forward_flops <= 4 * a.forward_flops for a, b in zip(one, four, strict=True))
    assert sum(a.stash_bytes for a in one) < sum(a.stash_bytes for a in four)
    assert one[0].cut_bytes == 0
    assert all(a.cut_bytes <= b.cut_bytes <= 4 * a.cut_bytes for a, b in zip(one, four, strict=True))
    assert all(b.weight_bytes == a.weight_bytes for a, b in zip(one, four, strict=True))


@pytest.mark.parametrize("count", range(1, 9))
def test_every_edge_has_one_producer_and_reaches_its_readers(case: Case, count: int) -> None:
    if count > case.atoms:
        pytest.skip("fewer atoms than stages")
    dag = case.captured.opdag
    programs = split(dag, case.cuts(count))
    flow = analyse(dag)
    assert [p.stage for p in programs] == list(range(count))
    for p in programs:
        made = {v for n in p.nodes for v in dag.nodes[n].outs}
        names = {q.name: q.value for q in (*dag.params, *dag.buffers)}
        known = {*p.inputs, *p.consts, *(e.value for e in p.edges_in), *(w.value for w in p.shared)}
        known |= {names[n] for n in (*p.params, *p.buffers)}
        for n in p.nodes:
            assert set(flow.reads[n]) <= made | known
        assert not made & {e.value for e in p.edges_in}
        assert {e.value for e in p.edges_out} <= made
        assert all(e.src < e.dst for e in (*p.edges_in, *p.edges_out))
    out = {e for p in programs for e in p.edges_out}
    assert out == {e for p in programs for e in p.edges_in}
    assert sorted(n for p in programs for n in p.params) == sorted(q.name for q in dag.params)
    changing = [b.name for b in dag.buffers if b.update is not None]
    assert sorted(n for p in programs for n in p.buffers if n in changing) == sorted(changing)
    assert sum(p.has_loss for p in programs) == 1


@pytest.mark.parametrize("count", [2, 5, 8])
def test_only_floats_of_the_model_cross_cuts(case: Case, count: int) -> None:
    dag = case.captured.opdag
    edges = [e for p in split(dag, case.cuts(min(count, case.atoms))) for e in p.edges_out]
    assert edges
    assert {dag.values[e.value].dtype for e in edges} == {"float32"}


def test_cut_bytes_are_what_the_edges_carry(case: Case) -> None:
    """Through each single cut go exactly the bytes that its atom says, forward."""
    from fusion_p2p.cost import spec_bytes

    dag = case.captured.opdag
    for at, atom in enumerate(atoms(dag, 2)):
        if at:
            first, _ = split(dag, (at,))
            assert sum(spec_bytes(dag.values[e.value], 2) for e in first.edges_out) == atom.cut_bytes
            shared = sum(spec_bytes(dag.values[w.value], 2) for w in first.shared)
            assert shared == atom.cut_weight_bytes


def test_skip_edges_go_straight_to_their_readers() -> None:
    case = models.skip_net()
    programs = split(case.captured.opdag, case.cuts(4))
    spans = {e.dst - e.src for p in programs for e in p.edges_out}
    assert max(spans) == 3
    value = next(e.value for p in programs for e in p.edges_out if e.dst - e.src == 3)
    assert not [e for p in programs for e in p.edges_out if e.value == value and e.src != 0]


def test_the_batch_goes_only_to_stages_that_read_it() -> None:
    case = models.gpt2()
    dag = case.captured.opdag
    names = {i.value: i.name for i in dag.inputs}
    programs = split(dag, case.cuts(4))
    assert [[names[v] for v in p.inputs] for p in programs] == [["input_ids"], [], [], ["labels"]]


def test_masks_are_computed_where_they_are_used() -> None:
    case = models.gpt2()
    dag = case.captured.opdag
    live = set(analyse(dag).order)
    programs = split(dag, case.cuts(4))
    twice = set(programs[1].nodes) & set(programs[2].nodes)
    assert not twice & live
    for a, b in itertools.combinations(programs, 2):
        assert not set(a.nodes) & set(b.nodes) & live


def test_a_tied_weight_has_one_owner() -> None:
    case = models.gpt2()
    programs = split(case.captured.opdag, case.cuts(4))
    (weight,) = programs[0].shared
    assert weight.stages == (0, 3)
    assert programs[0].foreign == ()
    assert programs[3].foreign == (weight,)
    assert (weight.below(3), weight.above(0), weight.above(3)) == (0, 3, None)
    assert "transformer.wte.weight" in programs[0].params
    assert not split(case.captured.opdag, ())[0].shared


def test_no_cut_inside_what_updates_a_buffer() -> None:
    case = models.resnet()
    dag = case.captured.opdag
    flow = analyse(dag)
    for b in dag.buffers:
        users = {n for n in flow.order if b.value in flow.reads[n] or b.update in dag.nodes[n].outs}
        assert sum(bool(users & set(a.nodes)) for a in atoms(dag)) <= 1


@pytest.mark.parametrize("cuts", [(0,), (3, 3), (4, 2), (10**6,), (-1,)])
def test_impossible_cuts_are_refused_with_the_range(cuts: tuple[int, ...]) -> None:
    case = models.gpt2()
    with pytest.raises(InputError, match=rf"must ascend within 1\.\.{case.atoms - 1}"):
        split(case.captured.opdag, cuts)


def test_programs_survive_bytes() -> None:
    case = models.skip_net()
    for program in split(case.captured.opdag, case.cuts(3)):
        raw = msgspec.msgpack.encode(program)
        assert msgspec.msgpack.decode(raw, type=StageProgram) == program
