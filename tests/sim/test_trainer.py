"""The trainer session against volunteers in memory: plans, refusals, complete sets, losses. No sockets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from fusion_p2p.capture import Captured, capture
from fusion_p2p.errors import InputError
from fusion_p2p.optim import AdamW
from fusion_p2p.pipeline import LocalPipeline
from fusion_p2p.plan import LinkCodec, NumericLogEntry, Numerics
from fusion_p2p.settings import OptimizerSpec
from fusion_p2p.snapshot import digest, from_bytes, initial_state, to_bytes, weights, weights_blake2b
from fusion_p2p.workload import atoms
from peer import trainer_assembly, trainer_sets
from peer.blobs import serve_blobs
from peer.channel_io import ChannelSettings
from peer.events import Happening, RunEvent, StepResult
from peer.placement import make_plan
from peer.protocol import CONTROL, Accepted, AtomSeconds, Refused, StageFault
from peer.ratelimit import Limiter
from peer.signing import make_run_spec, new_session_key
from peer.trainer import Trainer
from peer.trainer_adopt import Replay
from peer.trainer_host import RunPaused
from peer.trainer_live import Live, TrainerOptions
from peer.trainer_session import CERT_S, Session
from peer.trainer_spares import LOOK_S
from peer.trainer_state import RunFolder
from peer.trainer_swarm import Swarm
from tests.memory_transport import Network
from tests.sim.mini_volunteer import MiniVolunteer
from tests.simulated_time import simulate

NUMERICS = Numerics(cuts=(), micro_batches=3, micro_batch_size=2)
OPTIMIZER = AdamW(lr=1e-2, clip_norm=1.0)
MINUTE = pytest.mark.timeout(400)
WALL = 1.8e9  # where wall clocks begin


class _Net(torch.nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(3)
        sizes = (8, width, width, width)
        self.layers = torch.nn.Sequential(
            *(m for n in sizes for m in (torch.nn.Linear(n, width), torch.nn.Tanh())), torch.nn.Linear(width, 1)
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((self.layers(x)[:, 0] - y) ** 2).mean()


def batch(step: int, samples: int = 6) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(samples, 8, generator=generator), "y": torch.randn(samples, generator=generator)}


@pytest.fixture(scope="module")
def captured() -> Captured:
    return capture(_Net(), batch(0))


def expected(
    captured: Captured,
    cuts: tuple[int, ...],
    steps: int,
    codecs: tuple[LinkCodec, ...] = (),
    optimizer: OptimizerSpec = OPTIMIZER,
) -> tuple[list[float], str]:
    local = LocalPipeline(captured, optimizer=optimizer, micro_batches=3, micro_batch_size=2, cuts=cuts, codecs=codecs)
    return [local.train_step(batch(i)) for i in range(steps)], local.weights_blake2b()


class _Board:
    """`peers` as `dht.node.Board` has it."""

    def __init__(self, volunteers: list[MiniVolunteer]) -> None:
        self._volunteers = volunteers

    async def fences(self) -> tuple[()]:
        return ()

    async def peers(self) -> tuple[object, ...]:
        return tuple(v.record() for v in self._volunteers if v.alive)


class Lab:
    """A run folder, a network, volunteers."""

    def __init__(self, captured: Captured, root: Path, optimizer: OptimizerSpec = OPTIMIZER) -> None:
        self.captured, self.folder = captured, RunFolder(root / "run")
        self.network, self.root = Network(), root
        self.volunteers: list[MiniVolunteer] = []
        self.heard: list[Happening] = []
        self.key = new_session_key()
        spec = make_run_spec(
            self.key, name="lab", opdag_hash=captured.opdag.hash, seed=0, optimizer=optimizer, created=1.0
        )
        self.folder.create(spec[1], captured.opdag.to_bytes())

    async def add(self, peer: str, refuse: dict[int, Refused | Accepted] | None = None) -> MiniVolunteer:
        volunteer = MiniVolunteer(self.network, peer, self.root, refuse)
        await volunteer.start()
        self.volunteers.append(volunteer)
        return volunteer

    async def fill(self, count: int) -> None:
        """So many volunteers: volunteer0, volunteer1, and so on."""
        for k in range(count):
            await self.add(f"volunteer{k}")

    def host(self, trainer: Trainer, stage: int) -> MiniVolunteer:
        peer = trainer.plan.host(stage).peer
        return next(v for v in self.volunteers if v.peer == peer)

    @asynccontextmanager
    async def trainer(
        self,
        stages: int | None,
        *,
        recover_s: float = 20.0,
        marks: int = 4,
        compression: str = "adatopk",
        script: tuple[NumericLogEntry, ...] = (),
        adaptive: bool = False,
        clock: Callable[[], float] | None = None,
        replay: Replay | None = None,
        dies: bool = False,
    ) -> AsyncIterator[Trainer]:
        """`clock`: the wall's; None: one that goes with the loop's. `dies`: at the end it tells nobody, and its
        volunteers live on."""
        epoch = self.folder.next_epoch()
        transport = self.network.transport(f"trainer-{epoch}")
        signed, spec = self.folder.spec()
        loop = asyncio.get_running_loop()
        trainer = Trainer(
            transport=transport,
            swarm=Swarm(_Board(self.volunteers)),  # type: ignore[arg-type]
            session=Session(
                signed_spec=signed,
                spec=spec,
                owner_key=self.key,
                epoch=epoch,
                clock=clock or (lambda: WALL + loop.time()),
            ),
            folder=self.folder,
            dag=self.captured.opdag,
            options=TrainerOptions(
                numerics=NUMERICS,
                stages=stages,
                compression=compression,
                peers=len(self.volunteers),
                gather_s=5.0,
                recover_s=recover_s,
                mark_interval=marks,
                script=script,
                adaptive=adaptive,
            ),
            initial=lambda program: to_bytes(initial_state(self.captured.state, program)),
            sink=self.heard.append,
            clock=loop.time,
        )
        await serve_blobs(
            transport, self.folder.blobs, lambda *_: True, limiter=Limiter(None), settings=ChannelSettings()
        )
        try:
            async with trainer:
                await trainer.start(b"at 0", replay)
                yield trainer
                if dies:
                    trainer._live.assembly._hosts.clear()
        finally:
            await transport.close()
            for volunteer in self.volunteers:
                if volunteer.alive and not dies:
                    await volunteer.transport.close()

    async def train(self, trainer: Trainer, first: int, last: int, after: Callable[[int], object] = id) -> list[float]:
        losses = []
        pending: list[asyncio.Future[object]] = []
        for step in range(first, last):
            pending.append(await trainer.release(self.captured.feed(batch(step)), training=True))  # type: ignore[arg-type]
            if len(pending) == 2 or step == last - 1:
                while pending:
                    losses.append((await trainer.wait(pending.pop(0))).loss)  # type: ignore[arg-type]
            outcome = after(step)
            if asyncio.iscoroutine(outcome):
                await outcome
        return losses

    async def hash(self, trainer: Trainer, step: int) -> str:
        manifest = await trainer.save(b"at %d" % step)
        return weights_blake2b(weights(from_bytes(d) for d in self.folder.snapshots(manifest).values()))

    def kinds(self) -> list[str]:
        return [h.kind for h in self.heard if isinstance(h, RunEvent)]


@MINUTE
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_trains_as_the_local_pipeline(captured: Captured, tmp_path: Path, stages: int) -> None:
    async def main() -> None:
        lab = Lab(captured, tmp_path)
        await lab.fill(stages)
        async with lab.trainer(None) as trainer:
            losses = await lab.train(trainer, 0, 5)
            assert trainer.plan.numerics.stages == stages
            want = expected(captured, trainer.plan.numerics.cuts, 5)
            assert losses == want[0] and await lab.hash(trainer, 5) == want[1]
        steps = [h for h in lab.heard if isinstance(h, StepResult)]
        assert [s.step for s in steps] == list(range(5)) and all(s.samples == 6 for s in steps)
        assert len(lab.folder.numeric_log()) == 1

    simulate(main())


@MINUTE
def test_a_refusal_makes_another_plan(captured: Captured, tmp_path: Path) -> None:
    no = Refused(code="policy", reason="not today", stage=1)

    async def main() -> None:
        lab = Lab(captured, tmp_path)
        await lab.add("willing0")
        unwilling = await lab.add("unwilling", {0: no, 1: no})
        await lab.add("willing1")
        async with lab.trainer(2) as trainer:
            assert {p.peer for p in trainer.plan.placement} == {"willing0", "willing1"}
            assert unwilling.offered and "refused" in lab.kinds()
            await lab.train(trainer, 0, 2)

    simulate(main())


@MINUTE
@pytest.mark.parametrize("lie", ["foreign", "huge"])
def test_a_host_that_lies_about_its_snapshot_is_replaced(captured: Captured, tmp_path: Path, lie: str) -> None:
    """The set is made without it, nothing of its bytes is kept, and the weights are those of an honest run."""

    async def main() -> None:
        lab = Lab(captured, tmp_path)
        await lab.fill(3)
        async with lab.trainer(2) as trainer:
            await lab.train(trainer, 0, 3)
            liar = lab.host(trainer, 1)
            honest = liar.store.put
            raw = to_bytes({"param/mine": torch.ones(3)})

            def put(data: bytes) -> tuple[str, int]:
                blob, size = honest(raw)
                return blob, size if lie == "foreign" else 1 << 50

            liar.store.put = put  # type: ignore[method-assign, assignment]
            assert await lab.hash(trainer, 3) == expected(captured, trainer.plan.numerics.cuts, 3)[1]
            assert lab.host(trainer, 1) is not liar and not lab.folder.blobs.has(digest(raw))

    simulate(main())


@MINUTE
def test_a_trial_step_slower_than_promised_moves_work_before_the_start(captured: Captured, tmp_path: Path) -> None:
    async def main() -> None:
        lab = Lab(captured, tmp_path)
        slow, fast = await lab.add("volunteer0"), await lab.add("volunteer1")
        slow.trial_s, fast.trial_s = 1.0, 0.01
        async with lab.trainer(2) as trainer:
            plan = trainer.plan
            bounds = (0, *plan.numerics.cuts, len(atoms(captured.opdag, 2)))
            size = {p.peer: bounds[p.stage + 1] - bounds[p.stage] for p in plan.placement}
            assert plan.number == 2 and len(slow.offered) == len(fast.offered) == 2
            assert size["volunteer0"] == 1 < size["volunteer1"]
            assert any("volunteer0"[-8:] in r and "steps take" in r for r in plan.reasons)
            want = expected(captured, plan.numerics.cuts, 3)
            assert await lab.train(trainer, 0, 3) == want[0] and await lab.hash(trainer, 3) == want[1]
        assert [entry.numerics for _, entry in lab.folder.numeric_log()] == [plan.numerics]

    simulate(main())


@MINUTE
def test_a_newcomer_is_used_only_after_its_timed_trial_step(captured: Captured, tmp_path: Path) -> None:
    """Who accepts without the trial step is planned without; what devices say of
    their operators goes with them into the plan, what they cannot know does not."""

    async def main() -> None:
        lab = Lab(captured, tmp_path)
        lazy, count = await lab.add("volunteer0"), len(atoms(captured.opdag, 2))
        told = [await lab.add(f"volunteer{k}") for k in (1, 2)]
        lazy.trial_s = -1.0
        told[0].atoms = tuple(AtomSeconds(1.0 + k, 2.0) for k in range(count))
        told[1].atoms = told[0].atoms[1:]
        async with lab.trainer(2) as trainer:
            live = trainer._live
            assert {p.peer for p in trainer.plan.placement} == {"volunteer1", "volunteer2"}
            assert all(o.shape is None for o in live.devices() if o.confirmed)  # one machine: alike
            by_peer = {o.peer: o for o in live.assembly.timed(replace(o, machine="") for o in live.devices())}
            assert by_peer["volunteer1"].confirmed and by_peer["volunteer2"].confirmed
            shape = by_peer["volunteer1"].shape
            assert shape is not None and shape.forward_s[1] == 2.0 and by_peer["volunteer2"].shape is None
            [newcomer] = live.assembly.timed([replace(by_peer["volunteer1"], peer="volunteer0")])
            assert not newcomer.confirmed
            plan = make_plan(live.atoms, [newcomer, by_peer["volunteer1"]], replace(live.request, canary=False))
            assert {p.peer for p in plan.placement} == {"volunteer1"}
            await lab.train(trainer, 0, 1)
        assert len(lazy.offered) == 1 and lab.kinds().count("refused") == 1

    simulate(main())


@MINUTE
def test_who_was_lost_before_it_accepted_again_keeps_its_stage(
    captured: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stream breaks after it accepted; then trial steps change the plan and it is asked anew."""

    async def main() -> None:
        lab, loop = Lab(captured, tmp_path), asyncio.get_running_loop()
        slow, fast = await lab.add("volunteer0"), await lab.add("volunteer1")
        slow.trial_s, fast.trial_s = 1.0, 0.01
        heard, honest, before = threading.Event(), trainer_assembly.revise, Live.lose

        def lose(live: Live, peer: str, reason: str, *, moving: bool = False) -> None:
            before(live, peer, reason, moving=moving)
            heard.set()

        def revise(*arguments: Any, **options: Any) -> Any:  # on a thread
            if not heard.is_set():
                loop.call_soon_threadsafe(lambda: slow.messages and slow.messages.close())
                assert heard.wait(10.0)
            return honest(*arguments, **options)

        monkeypatch.setattr(Live, "lose", lose)
        monkeypatch.setattr(trainer_assembly, "revise", revise)
        async with lab.trainer(2) as trainer:
            assert len(slow.offered) == 2 and not trainer._live.lost
            losses = await lab.train(trainer, 0, 3)
            assert losses == expected(captured, trainer.plan.numerics.cuts, 3)[0]
            assert trainer.plan.number == 2 and "lost" not in lab.kinds()

    simulate(main())


@MINUTE
def test_a_host_that_repeats_its_complaint_is_told_once(captured: Captured, tmp_path: Path) -> None:
    async def main() -> None:
        lab = Lab(captured, tmp_path)
        await lab.fill(2)
        async with lab.trainer(2) as trainer:
            talkative, p = lab.host(trainer, 1), trainer.plan.host(1)
            assert talkative.messages is not None
            said = StageFault(
                run=lab.folder.spec()[1].run, stage=1, incarnation=p.incarnation, code="stale", reason="so it says"
            )
            for _ in range(1000):
                await talkative._say(talkative.messages, said)
            await lab.train(trainer, 0, 3)
        assert lab.kinds().count("waiting") == 1 and "lost" not in lab.kinds()

    simulate(main())


@MINUTE
def test_a_host_that_is_reached_elsewhere_is_told_to_its_neighbours_and_no_stream_is_cut(
    captured: Captured, tmp_path: Path
) -> None:
    async def main() -> None:
        lab = Lab(captured, tmp_path)
        await lab.fill(2)
        async with lab.trainer(2) as trainer:
            await lab.train(trainer, 0, 2)
            first, second = lab.host(trainer, 0), lab.host(trainer, 1)
            assembly = trainer._live.assembly
            accepted = assembly._accepted[1]
            second.addresses = ("/ip4/192.0.2.8/tcp/8",)
            await trainer._live.swarm.offers()
            assert assembly.moved
            assembly._accepted[1] = accepted[0], msgspec.structs.replace(accepted[1], incarnation=9)
            assert not assembly.moved  # another end is another plan's to tell
            assembly._accepted[1] = accepted
            opened, plan = lab.network.opened, trainer.plan
            second.addresses = ("/ip4/192.0.2.9/tcp/9",)
            await asyncio.sleep(3 * LOOK_S)
            assert first.hosted[0].links._endpoints[1].addresses == second.addresses
            assert trainer._live.now.links._endpoints[1].addresses == second.addresses
            await lab.train(trainer, 2, 4)
            assert (lab.network.opened, trainer.plan) == (opened, plan)
        assert "lost" not in lab.kinds()

    simulate(main())


@MINUTE
def test_a_codec_is_signed_into_the_numeric_log_and_outlives_a_loss(tmp_path: Path) -> None:
    captured = capture(_Net(width=128), batch(0))  # smaller frames are sent as they are

    async def main() -> None:
        lab = Lab(captured, tmp_path)
        await lab.fill(4)
        async with lab.trainer(3, compression="int8") as trainer:
            codecs = (LinkCodec(0, 1, "int8"), LinkCodec(1, 2, "int8"))
            ((_, entry),) = lab.folder.numeric_log()
            assert entry.numerics.codecs == trainer.plan.numerics.codecs == codecs

            async def fate(step: int) -> None:
                if step == 3:
                    await trainer.save(b"at 4")
                if step == 6:
                    await lab.host(trainer, 1).kill()

            losses = await lab.train(trainer, 0, 10, fate)
            want = expected(captured, trainer.plan.numerics.cuts, 10, codecs)
            assert losses == want[0] and await lab.hash(trainer, 10) == want[1]
            assert losses != expected(captured, trainer.plan.numerics.cuts, 10)[0]
        async with lab.trainer(3) as again:  # resumed: the first entry stands
            assert again.plan.numerics.codecs == codecs

    simulate(main())


@MINUTE
@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("marks", [0, 4])
def test_a_lost_stage_is_rebuilt_from_the_set(captured: Captured, tmp_path: Path, lost: int, marks: int) -> None:
    """With marks promised the edges are logged and the others keep their state; without, all roll back."""

    async def main() -> None:
        lab = Lab(captured, tmp_path)
        await lab.fill(4)
        async with lab.trainer(3, marks=marks) as trainer:

            async def fate(step: int) -> None:
                if step == 3:
                    await trainer.save(b"at 4")
                if step == 6:
                    await lab.host(trainer, lost).kill()

            losses = await lab.train(trainer, 0, 10, fate)
            want = expected(captured, trainer.plan.numerics.cuts, 10)
            assert losses == want[0] and await lab.hash(trainer, 10) == want[1]
            assert {"lost", "recovered"} <= set(lab.kinds())
            moved = [p.stage for p in trainer.plan.placement if p.incarnation > 1]
            assert moved == ([lost] if marks else [0, 1, 2])

    simulate(main())


@MINUTE
@pytest.mark.parametrize("place_s", [5.0, 0.0])
def test_a_set_that_is_nearly_complete_waits_for_a_stage_that_is_rebuilt_from_the_one_before(
    captured: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place_s: float
) -> None:
    """All have made their snapshots, which have just been fetched, when a host dies. To record the set now would trim
    the frames that the stage, at work from the last set on, still has to be fed. `place_s`: that its new host takes; or
    it is there first."""

    async def main() -> None:
        lab = Lab(captured, tmp_path)
        await lab.fill(4)
        may_come, placing, fetched = asyncio.Event(), asyncio.Event(), list[Path]()
        fetch, place = trainer_sets.fetch_blob, trainer_assembly.Assembly.place
        slow = False

        async def fetch_later(*args: Any, **options: Any) -> Path:
            path = await fetch(*args, **options)
            if slow:
                fetched.append(path)
                await may_come.wait()
            return path

        async def place_later(*args: Any, **options: Any) -> Any:
            placing.set()
            await asyncio.sleep(place_s)
            return await place(*args, **options)

        async with lab.trainer(3) as trainer:
            monkeypatch.setattr(trainer_sets, "fetch_blob", fetch_later)
            monkeypatch.setattr(trainer_assembly.Assembly, "place", place_later)

            async def fate(step: int) -> None:
                nonlocal slow
                if step == 3:
                    await trainer.save(b"at 4")
                if step == 5:
                    slow = True
                    await trainer.mark(b"at 6")
                if step == 8:
                    while len(fetched) < 3:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                    await lab.host(trainer, 1).kill()
                    await placing.wait()
                    while not place_s and "recovered" not in lab.kinds():  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                    may_come.set()

            losses = await lab.train(trainer, 0, 12, fate)
            want = expected(captured, trainer.plan.numerics.cuts, 12)
            assert losses == want[0] and await lab.hash(trainer, 12) == want[1]
            assert [p.stage for p in trainer.plan.placement if p.incarnation > 1] == [1]

    simulate(main())


@MINUTE
@pytest.mark.parametrize("beside", ["", "one is dead", "one has lost its stage"])
def test_a_trainer_that_was_away_finds_its_hosts_where_they_were(
    captured: Captured, tmp_path: Path, beside: str
) -> None:
    """Every control stream ends at once, as after a trainer has slept; nobody else could take the stages."""

    async def main() -> None:
        lab = Lab(captured, tmp_path)
        await lab.fill(3)
        async with lab.trainer(3) as trainer:

            async def fate(step: int) -> None:
                if step == 3:
                    await trainer.save(b"at 4")
                if step == 6:
                    if beside == "one is dead":
                        await lab.host(trainer, 1).kill()
                    if beside == "one has lost its stage":
                        await lab.host(trainer, 1)._drop(1)
                    for pipe in [p for p in lab.network.pipes if p.protocol == CONTROL]:
                        pipe.cut()

            losses = await lab.train(trainer, 0, 10, fate)
            want = expected(captured, trainer.plan.numerics.cuts, 10)
            assert losses == want[0] and await lab.hash(trainer, 10) == want[1]
            made_anew = [p.stage for p in trainer.plan.placement if p.incarnation > 1]
            assert made_anew == {"": [], "one has lost its stage": [0, 1, 2]}.get(beside, made_anew)
            assert (1 in made_anew) == bool(beside)
        said = [h.text for h in lab.heard if isinstance(h, RunEvent) and h.kind == "recovered"]
        assert any("answers again" in text for text in said)

    simulate(main())


@MINUTE
@pytest.mark.parametrize("stage", [0, 99])
def test_who_hosts_nothing_accuses_nobody(captured: Captured, tmp_path: Path, stage: int) -> None:
    async def main() -> None:
        lab = Lab(captured, tmp_path)
        await lab.fill(3)
        async with lab.trainer(2) as trainer:
            hosts = {p.peer for p in trainer.plan.placement}
            (spare,) = {v.peer for v in lab.volunteers} - hosts
            for accused in hosts:
                said = StageFault(
                    run=trainer._live.run,
                    stage=stage,
                    incarnation=1 << 30,
                    code="peer-frame",
                    reason="a lie",
                    peer=accused,
                )
                trainer._hearing.fault(spare, said)
            await lab.train(trainer, 0, 3)
            assert all(trainer._live.may_host(v.peer) for v in lab.volunteers) and "lost" not in lab.kinds()
            assert {p.peer for p in trainer.plan.placement} == hosts

    simulate(main())


@MINUTE
def test_neighbours_lost_together(captured: Captured, tmp_path: Path) -> None:
    async def main() -> None:
        lab = Lab(captured, tmp_path)
        await lab.fill(3)
        async with lab.trainer(3) as trainer:

            async def fate(step: int) -> None:
                if step == 4:
                    await asyncio.gather(*(lab.host(trainer, k).kill() for k in (1, 2)))

            losses = await lab.train(trainer, 0, 8, fate)
            assert {p.peer for p in trainer.plan.placement} == {"volunteer0"}
            want = expected(captured, trainer.plan.numerics.cuts, 8)
            assert losses == want[0] and await lab.hash(trainer, 8) == want[1]

    simulate(main())


@MINUTE
def test_nobody_left_pauses_and_another_swarm_resumes(captured: Captured, tmp_path: Path) -> None:
    async def main() -> None:
        lab = Lab(captured, tmp_path)
        await lab.fill(2)

        async def fate(step: int) -> None:
            if step == 3:
                await trainer.save(b"at 4")
            if step == 5:
                await lab.host(trainer, 1).kill()

        with pytest.raises(RunPaused, match=r"stage 1.*saved up to step 4, continue with: fusion-run resume"):
            async with lab.trainer(2, recover_s=0.0) as trainer:
                await lab.train(trainer, 0, 10, fate)
        lab.volunteers = []
        for k in range(3):
            await lab.add(f"other{k}")
        async with lab.trainer(None) as again:
            assert again.step == 4 and lab.folder.manifest().data_state == b"at 4"
            await lab.train(again, 4, 10)
            assert again.plan.numerics.stages == 2
            assert await lab.hash(again, 10) == expected(captured, again.plan.numerics.cuts, 10)[1]

    simulate(main())


@MINUTE
def test_who_refuses_for_memory_again_and_again_is_asked_twice(captured: Captured, tmp_path: Path) -> None:
    no = {k: Refused(code="memory", reason="too large", stage=k, needed=1000, cap=999) for k in (0, 1)}

    async def main() -> None:
        lab = Lab(captured, tmp_path)
        await lab.add("a")
        unwilling = await lab.add("b", dict(no))
        async with lab.trainer(2) as trainer:
            assert {p.peer for p in trainer.plan.placement} == {"a"}
        assert 1 <= len(unwilling.offered) <= 2

    simulate(main())


@MINUTE
@pytest.mark.parametrize("lie", [{"run": "another"}, {"incarnation": 77}])
def test_who_accepts_another_stage_than_the_offered_is_left_out(
    captured: Captured, tmp_path: Path, lie: dict[str, Any]
) -> None:
    async def main() -> None:
        lab = Lab(captured, tmp_path)
        run = lab.folder.spec()[1].run
        words = {
            k: {"run": run, "stage": k, "incarnation": 0, "endpoint": "e", "memory_bytes": 1} | lie for k in (0, 1)
        }
        liar = await lab.add("liar", {k: Accepted(**word) for k, word in words.items()})
        with pytest.raises(InputError, match="after a refusal: accepts what it was not offered"):
            async with lab.trainer(1):
                pass
        assert len(liar.offered) == 1

    simulate(main())


class Data:
    """The batches from step `first` on, once more; `shift` makes them others."""

    def __init__(self, captured: Captured, first: int, shift: int = 0) -> None:
        self.captured, self.first, self.next, self.shift = captured, first, first, shift

    def replay(self) -> Replay:
        def draw() -> Any:
            self.next += 1
            return self.captured.feed(batch(self.next - 1 + self.shift))

        def rewind() -> None:
            self.next = self.first

        return Replay(draw, rewind)


@MINUTE
@pytest.mark.parametrize("gone", [None, 1], ids=["all there", "one gone"])
def test_a_trainer_that_died_finds_its_stages_where_they_were(
    captured: Captured, tmp_path: Path, gone: int | None
) -> None:
    """Two steps under way and all since the set come out once, nothing is computed twice, the weights are the same."""

    async def main() -> None:
        lab = Lab(captured, tmp_path)
        await lab.fill(4)
        async with lab.trainer(3, dies=True) as trainer:
            await lab.train(trainer, 0, 4)
            await trainer.save(b"at 4")
            await lab.train(trainer, 4, 7)
            hosts = {k: lab.host(trainer, k) for k in range(3)}
            for step in (7, 8):
                await trainer.release(captured.feed(batch(step)), training=True)
        if gone is not None:
            await hosts[gone].kill()
        lab.heard.clear()
        before = [list(v.offered) for v in lab.volunteers]
        async with lab.trainer(3, replay=Data(captured, 4).replay()) as again:
            assert again.step == 9
            losses = await lab.train(again, 9, 12)
            want = expected(captured, again.plan.numerics.cuts, 12)
            assert losses == want[0][9:] and await lab.hash(again, 12) == want[1]
            steps = [h for h in lab.heard if isinstance(h, StepResult)]
            assert [s.step for s in steps] == list(range(4, 12)) and [s.loss for s in steps] == want[0][4:]
            adopted = [k for k in range(3) if k != gone]
            assert sorted(k for v in lab.volunteers for k in v.adopted) == adopted
            offered = [k for v, b in zip(lab.volunteers, before, strict=True) for k in v.offered[len(b) :]]
            assert offered == ([] if gone is None else [gone])
            assert again.plan.epoch == 2 and [p.incarnation for p in again.plan.placement if p.stage != gone] == [1] * (
                len(adopted)
            )

    simulate(main())


@MINUTE
@pytest.mark.parametrize("why", ["other data", "an evaluation", "no stage"])
def test_what_cannot_be_adopted_is_restored(captured: Captured, tmp_path: Path, why: str) -> None:
    async def main() -> None:
        lab = Lab(captured, tmp_path)
        await lab.fill(2)
        async with lab.trainer(2, dies=True) as trainer:
            await lab.train(trainer, 0, 4)
            await trainer.save(b"at 4")
            await lab.train(trainer, 4, 6)
            if why == "an evaluation":
                await trainer.wait(await trainer.release(captured.feed(batch(99)), training=False))
        if why == "no stage":
            for volunteer in lab.volunteers:
                for stage in list(volunteer.hosted):
                    await volunteer._drop(stage)
        data = Data(captured, 4, 50 if why == "other data" else 0)
        async with lab.trainer(2, replay=data.replay()) as again:
            assert again.step == 4 and data.next == 4 and "notice" in lab.kinds()
            losses = await lab.train(again, 4, 8)
            want = expected(captured, again.plan.numerics.cuts, 8)
            assert losses == want[0][4:] and await lab.hash(again, 8) == want[1]
            assert not any(v.adopted for v in lab.volunteers)

    simulate(main())


@MINUTE
def test_the_session_is_certified_anew_at_half_of_its_life(captured: Captured, tmp_path: Path) -> None:
    async def main() -> None:
        lab, now = Lab(captured, tmp_path), [1000.0]
        await lab.fill(2)
        async with lab.trainer(2, clock=lambda: now[0]) as trainer:
            keeping = asyncio.create_task(trainer._live.assembly.keep_certified(look_s=0.01))
            await asyncio.sleep(0.1)
            assert all(v.renewed.empty() for v in lab.volunteers)
            for _ in range(2):
                now[0] += CERT_S / 2
                for volunteer in lab.volunteers:
                    assert (await volunteer.renewed.get()).expires == now[0] + CERT_S
            keeping.cancel()

    simulate(main())
