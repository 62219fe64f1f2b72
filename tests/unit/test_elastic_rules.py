"""Pure rules of elasticity: chaos schedules, buddies, who counts as slow and whether moving it away pays."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_p2p.errors import InputError
from fusion_p2p.plan import Numerics, Plan, StagePlacement
from fusion_p2p.workload import Atom
from peer.accusations import DOUBT_S, Accusations, Judgement
from peer.channel_io import ChannelSettings
from peer.lab.chaos import KINDS, parse, schedule
from peer.protocol import StageFault
from peer.quiet import MOST_KEYS, Quiet
from peer.trainer_buddies import buddies
from peer.trainer_complaints import Complaints
from peer.trainer_live import Live
from tests.simulated_time import simulate


def plan_of(*peers: str) -> Plan:
    cuts = tuple(range(1, len(peers)))
    numerics = Numerics(cuts=cuts, micro_batches=2, micro_batch_size=1)
    placement = tuple(StagePlacement(stage=k, peer=p) for k, p in enumerate(peers))
    return Plan(number=1, epoch=1, numerics=numerics, placement=placement)


def atoms_of(count: int) -> list[Atom]:
    atom = Atom(
        nodes=(), weights=(), owned=(), parameters=1, weight_bytes=4, forward_flops=1, backward_flops=2,
        forward_bytes=0, stash_bytes=1, kernels=1, cut_bytes=0, cut_weight_bytes=0,
    )  # fmt: skip
    return [atom] * count


@given(st.integers(0, 2**32), st.integers(0, 40))
def test_schedules_repeat_and_fit(seed: int, faults: int) -> None:
    found = schedule(seed, faults, 60)
    assert found == schedule(seed, faults, 60)
    steps = [f.step for f in found]
    assert steps == sorted(set(steps)) and all(0 <= s < 54 for s in steps)
    counts = Counter(f.kind for f in found)
    assert max(counts.values(), default=0) - min((counts[k] for k in KINDS), default=0) <= 1


def test_too_many_faults_and_malformed_seeds_are_refused() -> None:
    with pytest.raises(InputError, match="at most 54"):
        schedule(1, 55, 60)
    assert parse("7") == (7, 5) and parse("7:25") == (7, 25)
    for text in ("", "x", "1:y", "-1"):
        with pytest.raises(InputError, match="seed"):
            parse(text)


@settings(deadline=None)
@given(st.lists(st.sampled_from("abcde"), min_size=1, max_size=6), st.sets(st.sampled_from("abcdefgh")))
def test_a_buddy_is_somebody_else_who_can_be_reached(hosts: list[str], linked: set[str]) -> None:
    found = buddies(plan_of(*hosts), tuple(linked))
    for stage, peer in enumerate(hosts):
        if linked - {peer}:
            assert found[stage] in linked - {peer}
        else:
            assert stage not in found


def test_spares_are_buddies_first_and_neighbours_last() -> None:
    assert buddies(plan_of("a", "b"), ("a", "b", "x"))[0] == "x"
    assert buddies(plan_of("a", "b", "c", "d"), ("a", "b", "c", "d"))[0] in ("c", "d")


def test_a_buddy_that_the_plan_names_is_taken_if_it_can_be_reached() -> None:
    plan = plan_of("a", "b")
    placement = (msgspec.structs.replace(plan.placement[0], buddies=("b",)), plan.placement[1])
    plan = msgspec.structs.replace(plan, placement=placement)
    assert buddies(plan, ("a", "b", "x"))[0] == "b"
    assert buddies(plan, ("a", "x"))[0] == "x"


class _Judge:
    """What `Complaints` uses of a `Live`."""

    def __init__(self) -> None:
        self.now = SimpleNamespace(plan=plan_of("a", "b", "c"))
        self.options = SimpleNamespace(channels=ChannelSettings(beat_s=0.01, dead_s=0.04))
        self.lost: list[str] = []
        self.judgements: list[Judgement] = []

    def judged(self, found: Judgement) -> None:
        self.judgements.append(found)

    def lose(self, peer: str, reason: str) -> None:
        self.lost.append(peer)

    gone = lose


def complaint(code: str, stage: int, peer: str) -> StageFault:
    return StageFault(run="r", stage=stage, incarnation=0, code=code, reason="so it says", peer=peer)


async def _hear(*heard: tuple[str, StageFault]) -> list[str]:
    judge, tasks = _Judge(), list[asyncio.Task[None]]()
    complaints = Complaints(cast(Live, judge), lambda work: tasks.append(asyncio.ensure_future(work)), Accusations())
    for reporter, fault in heard:
        complaints.hear(reporter, fault)
    await asyncio.gather(*tasks)
    return judge.lost


def test_two_hosts_that_cannot_reach_each_other_lose_one() -> None:
    ab, ba, cb = complaint("peer-lost", 0, "b"), complaint("peer-lost", 1, "a"), complaint("peer-lost", 2, "b")
    assert simulate(_hear(("a", ab), ("b", ba))) in (["a"], ["b"])
    assert simulate(_hear(("a", ab), ("b", ba), ("c", cb))) == ["b"]  # two against one
    assert simulate(_hear(("a", ab), ("a", complaint("back", 0, "b")))) == []


def test_who_accuses_a_second_peer_of_its_frames_is_replaced() -> None:
    first, second = complaint("peer-frame", 1, "a"), complaint("peer-frame", 1, "c")
    assert simulate(_hear(("b", first))) == ["a"]
    assert simulate(_hear(("b", first), ("b", second))) == ["a", "b"]


@pytest.mark.parametrize("code", ["peer-lost", "peer-frame"])
def test_what_is_said_of_peers_that_host_nothing_is_not_kept(code: str) -> None:
    judge = _Judge()
    complaints = Complaints(cast(Live, judge), lambda work: pytest.fail("a task for nobody"), Accusations())
    complaints.hear("b", complaint(code, 1, "made up"))
    assert not judge.lost


def test_one_word_costs_a_rest_two_hosts_words_the_trust() -> None:
    heard = Accusations()
    assert [heard.hear("b", "a") for _ in range(3)] == [Judgement("a", DOUBT_S * 2**k) for k in range(3)]
    assert heard.hear("c", "a") == Judgement("a", math.inf) and heard.hear("b", "a").for_good


def test_a_lone_accuser_of_two_is_the_cause_and_clears_them() -> None:
    heard = Accusations()
    heard.hear("liar", "a")
    assert heard.hear("liar", "c") == Judgement("liar", math.inf, ("a", "c"))
    assert heard.hear("b", "a") == Judgement("a", DOUBT_S), "what the liar said counts no more"


def test_who_accuses_two_that_others_accuse_too_is_believed() -> None:
    heard = Accusations()
    for by, of in (("x", "a"), ("b", "a"), ("y", "c")):
        heard.hear(by, of)
    assert heard.hear("b", "c") == Judgement("c", math.inf)
    assert heard.hear("b", "d") == Judgement("d", DOUBT_S)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from("abcd")).filter(lambda p: p[0] != p[1])))
def test_one_liar_never_costs_another_its_trust_for_good(lies: list[tuple[str, str]]) -> None:
    """However it mixes what it says, as long as the others are silent."""
    heard = Accusations()
    for _, of in lies:
        found = heard.hear("liar", of)
        assert found.out == "liar" or not found.for_good


def test_who_repeats_itself_is_told_once_and_counted() -> None:
    quiet = Quiet(60.0)
    assert [quiet.may_tell("a", now) for now in (0.0, 1.0, 59.0, 60.5)] == [0, None, None, 2]
    assert quiet.may_tell("b", 1.0) == 0 and quiet.may_tell("a", -100.0) == 0  # the clock was set back
    for k in range(10 * MOST_KEYS):
        quiet.may_tell(k, 1.0)
    assert len(quiet._told) == MOST_KEYS
