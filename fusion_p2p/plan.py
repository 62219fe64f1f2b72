"""A plan's two parts: numerics change bits, placement does not (DESIGN section 2). Data only; planners fill it."""

from __future__ import annotations

import msgspec


class LinkCodec(msgspec.Struct, frozen=True):
    """The codec of every floating-point frame between stages `src` < `dst`, both directions; "dense" if unlisted."""

    src: int
    dst: int
    codec: str  # as in fusion_p2p.codec.parse: "dense", "dense:bf16", "int8", "topk-masked:0.01", ...


class Numerics(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that changes bits. `cuts` are atom positions: stage k holds atoms cuts[k-1] .. cuts[k]-1."""

    cuts: tuple[int, ...]
    codecs: tuple[LinkCodec, ...] = ()
    micro_batches: int
    micro_batch_size: int
    dtype: str = "float32"  # compute dtype; master weights are float32
    threads: int = 1
    device_class: str = "cpu"
    tf32: bool = False
    deterministic: bool = True
    recompute: bool = False

    @property
    def stages(self) -> int:
        return len(self.cuts) + 1


class NumericLogEntry(msgspec.Struct, frozen=True):
    """From optimizer step `first_step` on, `numerics` holds. The log is append-only and signed by the trainer."""

    first_step: int
    numerics: Numerics
    reason: str = ""


class StagePlacement(msgspec.Struct, frozen=True, kw_only=True):
    """Stage `stage` of replica `replica` runs on (peer, device). `incarnation` grows with every new host.

    `logged`: it keeps what it sent back to the newest complete set, so that a neighbour can be rebuilt alone; stages
    joined by an edge of which one end does not are a recovery group, and roll back together.
    """

    stage: int
    replica: int = 0
    peer: str  # peer id, base58
    device: str = "cpu"
    incarnation: int = 0
    window: int = 1  # micro-batches in flight at most
    buddies: tuple[str, ...] = ()
    logged: bool = False


class Prediction(msgspec.Struct, frozen=True):
    """What the planner expects of a plan, in seconds a step; 0 for a bound that was not computed."""

    step_time_s: float
    parts: dict[str, float] = {}  # named seconds that explain it
    lower_bound_s: float = 0.0

    def explain(self) -> str:
        """One line: the step time, what it is made of, and what no plan on these devices can beat."""
        parts = ", ".join(f"{name} {seconds:.3g}" for name, seconds in self.parts.items())
        bound = f"; at best {self.lower_bound_s:.3g} s" if self.lower_bound_s > 0 else ""
        return f"predicted step time {self.step_time_s:.3g} s{f' ({parts})' if parts else ''}{bound}"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Numbered; `numerics` repeats the log entry in force. `reasons` explain each choice in a line."""

    number: int
    epoch: int
    numerics: Numerics
    placement: tuple[StagePlacement, ...]
    spares: tuple[str, ...] = ()
    mark_interval: int = 0  # 0: no marks
    prediction: Prediction | None = None
    reasons: tuple[str, ...] = ()

    def host(self, stage: int, replica: int = 0) -> StagePlacement:
        for p in self.placement:
            if p.stage == stage and p.replica == replica:
                return p
        raise KeyError(f"plan {self.number} places no stage {stage} of replica {replica}")

    def explain(self) -> str:
        """Who hosts what and why, one line each."""
        lines = [
            f"plan {self.number}: {self.numerics.stages} stages, "
            f"{self.numerics.micro_batches} micro-batches of {self.numerics.micro_batch_size}"
        ]
        lines += [f"  stage {p.stage}: {p.peer[-8:]} ({p.device}), window {p.window}" for p in self.placement]
        lines += [f"  link {c.src}-{c.dst}: {c.codec}" for c in self.numerics.codecs]
        if self.prediction is not None:
            lines.append(f"  {self.prediction.explain()}")
        return "\n".join(lines + [f"  {r}" for r in self.reasons])
