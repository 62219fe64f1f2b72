"""Cuts, codecs and hosts that change while the run goes on: only at a complete set (DESIGN section 2).

Step S ends, every stage's snapshot is in the run folder, nothing is under way; then the state, keyed by parameter
name, is dealt out anew and everybody begins at S. Where only hosts change, the others keep their state. Until the new
hosts have accepted, nothing is given up that the set does not hold; if they do not, the old plan goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import msgspec

from fusion_p2p.errors import InputError
from fusion_p2p.plan import NumericLogEntry, Numerics, Plan
from fusion_p2p.snapshot import from_bytes, redistribute, to_bytes
from fusion_p2p.split import split
from peer.offers import DeviceOffer
from peer.placement import proposal_of
from peer.plan_change import Advice, hosts, prior_s, still_pays
from peer.plan_rates import corrections
from peer.rehost import recovery_group, relocated
from peer.signing import sign
from peer.trainer_assembly import MAX_PLANS
from peer.trainer_host import RunPaused
from peer.trainer_live import AFTER_REFUSAL_S, Live
from peer.trainer_state import Manifest, StageFile

Install = Callable[[Plan, list[DeviceOffer], Manifest], Awaitable[None]]


class Switch:
    """`turn` is held while ticks are released. `install` begins anew with a plan at a set, `adopt` puts a plan in
    force whose stages go on."""

    def __init__(
        self,
        live: Live,
        turn: asyncio.Lock,
        install: Install,
        adopt: Callable[[Plan], Awaitable[None]],
    ) -> None:
        self._live, self._turn, self._install, self._adopt = live, turn, install, adopt

    async def carry_out(self) -> Advice | None:
        """Make the change that is due, if the newest set stands where the next tick begins; the advice followed.

        RunPaused if the numeric log prescribes a change that no volunteer can host.
        """
        live, followed = self._live, None
        if not live.change_due:
            return None
        async with self._turn:
            while live.change_due and live.now.newest.tick == live.now.book.next_tick:
                await live.whole.wait()
                await live.now.idle.wait()
                async with live.placing:
                    if not live.lost and not live.now.book.open_ticks:
                        followed = await self._change() or followed
        return followed

    async def _change(self) -> Advice | None:
        live = self._live
        due = [e for e in live.script if e.first_step <= live.step]
        advice, live.advice = live.advice, None
        if due:
            live.script = [e for e in live.script if e.first_step > live.step]
            if due[-1].numerics != live.now.plan.numerics:
                await self._recut(due[-1].numerics, f"as the numeric log says: {due[-1].reason}", None)
            return None
        if advice is None or advice.plan is None:
            return None
        if advice.plan.numerics == live.now.plan.numerics:
            return advice if await self._move(advice, advice.plan) else None
        return advice if await self._recut(advice.plan.numerics, advice.reason, advice) else None

    # --- other cuts or codecs

    async def _recut(self, numerics: Numerics, reason: str, advice: Advice | None) -> bool:
        """Everybody begins anew at the set, under `numerics`; without `advice` it must be so.

        False if nobody would, or trial steps say that it does not pay: the old plan goes on.
        """
        live, old, loop = self._live, self._live.now, asyncio.get_running_loop()
        begin_s = loop.time()
        live.say("phase", f"changing cuts or codecs at step {live.step}: {reason}")
        manifest = await asyncio.to_thread(self._deal, old.newest, numerics)
        live.fence = old.number + 1
        await old.links.__aexit__(None, None, None)  # else they call those who are gone
        await live.assembly.clear("the cuts change")
        try:
            plan, offers = await self._assemble(numerics, manifest, old.number + 1)
            why = await self._second_thoughts(advice, plan) if advice is not None else ""
        except InputError as error:
            why = str(error)
        if why and advice is None:
            raise self._paused(why)
        if why:
            live.say("plan", f"the plan stays: {why}")
            await live.assembly.clear("the plan stays")
            try:
                plan, offers = await self._assemble(old.plan.numerics, old.newest, old.number + 1 + MAX_PLANS)
            except InputError as error:
                raise self._paused(str(error)) from None
            await self._install(plan, offers, old.newest)
            return False
        told = f"from step {live.step}: {reason}"
        plan = msgspec.structs.replace(plan, reasons=(*plan.reasons, told))
        await asyncio.to_thread(live.folder.save_set, manifest)
        entry = NumericLogEntry(live.step, plan.numerics, reason)
        await asyncio.to_thread(live.folder.append_numerics, sign(entry, live.session.owner_key))
        await self._install(plan, offers, manifest)
        live.recut_s = loop.time() - begin_s
        live.say("plan", f"plan {plan.number}, {plan.numerics.stages} stages, {told}")
        return True

    def _paused(self, why: str) -> RunPaused:
        live = self._live
        text = f"paused at step {live.step}, where the plan was to change: {why}"
        return RunPaused(f"{text}; continue with: fusion-run resume {live.folder.root}")

    def _deal(self, manifest: Manifest, numerics: Numerics) -> Manifest:
        """The same set under other cuts."""
        live = self._live
        snapshots = [from_bytes(data) for data in live.folder.snapshots(manifest).values()]
        files = []
        for program in split(live.dag, numerics.cuts):
            blob, size = live.folder.blobs.put(to_bytes(redistribute(snapshots, program)))
            files.append(StageFile(stage=program.stage, hash=blob, size=size))
        return msgspec.structs.replace(manifest, numerics=numerics, stages=tuple(files), epoch=live.session.epoch)

    async def _assemble(self, numerics: Numerics, manifest: Manifest, number: int) -> tuple[Plan, list[DeviceOffer]]:
        live = self._live
        request = replace(live.request, base=numerics, pinned=True, number=number)
        refs = live.refs(manifest)
        atoms = live.rates.scaled(live.atoms)
        return await live.assembly.assemble(
            atoms, live.devices(), request, lambda _: refs, manifest.tick, live.refused, live.rates.real
        )

    # --- other hosts

    async def _move(self, advice: Advice, target: Plan) -> bool:
        """The stages that `target` has elsewhere go there; False if its hosts would not, and nothing moved."""
        live, now = self._live, self._live.now
        here = now.plan
        moved = [k for k, (a, b) in enumerate(zip(hosts(here), hosts(target), strict=True)) if a != b]
        group = recovery_group(here, moved, now.edges())
        plan = relocated(here, target, group, number=now.number + 1, reason=advice.reason)
        now.number = plan.number
        refusals = await live.assembly.place(plan, group, live.refs(now.newest), now.newest.tick)
        for refusal in refusals:
            live.refused(refusal, AFTER_REFUSAL_S)
        why = refusals[0].reason if refusals else await self._second_thoughts(advice, plan)
        if why:
            live.say("plan", f"the plan stays: {why}")
            back = relocated(here, here, group, number=now.number + 1, reason="")
            now.number = back.number
            for r in await live.assembly.place(back, group, live.refs(now.newest), now.newest.tick):
                live.lose(r.placement.peer, r.reason)
            await self._leave_behind(plan, back, moved)
            await self._adopt(back)
            return False
        await self._adopt(plan)
        await self._leave_behind(here, plan, moved)
        live.say("plan", f"plan {plan.number} from step {live.step}: {advice.reason}")
        for k in moved:
            peer = plan.host(k).peer
            live.say("moving", f"stage {k} moved to {peer[-8:]}: {advice.reason}", peer=peer, stage=k)
        return True

    async def _leave_behind(self, before: Plan, after: Plan, stages: list[int]) -> None:
        for k in stages:
            if before.host(k).peer != after.host(k).peer:
                await self._live.assembly.drop(before.host(k).peer, (k,), "moved")

    async def _second_thoughts(self, advice: Advice, plan: Plan) -> str:
        """What the trial steps of hosts that were not known yet say: why the change does not pay, or ""."""
        live = self._live
        offers, request, atoms = live.devices(), live.request, live.rates.scaled(live.atoms)
        new = {k: s for k, s in live.assembly.trial_s().items() if hosts(plan)[k] not in live.rates.real}
        if not new:
            return ""
        prior = await asyncio.to_thread(prior_s, plan, atoms, offers, request)
        live.rates.hear_trials(corrections(dict(enumerate(hosts(plan))), new, prior))
        then = await asyncio.to_thread(proposal_of, plan, atoms, live.devices(), request)
        return still_pays(advice, then.step_s)
