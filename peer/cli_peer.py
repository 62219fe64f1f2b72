"""`fusion-peer`: offer this machine to a swarm. Nothing heavy is imported before the arguments are known."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from peer.cli_peer_options import join_options, parser

if TYPE_CHECKING:
    from fusion_p2p.estimator import OpTable
    from peer.daemon import JoinOptions, Ready
    from peer.local_control import PeerStatus
    from peer.preflight import Finding
    from peer.protocol import RunSpec

SLOWEST = 8  # operators that `fusion-peer bench` shows


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    top = parser()
    options = top.parse_args(argv)
    if getattr(options, "home", None) is not None:
        os.environ["FUSION_HOME"] = str(options.home.expanduser().absolute())
    from dht.errors import DhtError, SwarmUnreachable
    from fusion_p2p.errors import FusionError

    try:
        if options.command == "join":
            from peer.peer_settings import apply_settings

            options = apply_settings(top, options, argv)
        if "swarm_key" in options:
            _name_swarm(options)
        if options.command == "join":
            return _join(options)
        if options.command == "doctor":
            from peer import cli_doctor

            return cli_doctor.run(options)
        if options.command == "purge":
            return _purge(options)
        if options.command == "bench":
            return _bench(options)
        return _ask(options)
    except (DhtError, FusionError) as error:
        print(f"fusion-peer: {error}", file=sys.stderr)
        return 2 if isinstance(error, SwarmUnreachable) else error.exit_code
    except KeyboardInterrupt:
        return 130


def _name_swarm(options: argparse.Namespace) -> None:
    """The swarm's name and key as given, else as the environment has them, checked; for all that this process opens."""
    from dht.door import check_swarm_name, parse_swarm_key

    if name := options.swarm_name or os.environ.get("FUSION_SWARM_NAME"):
        os.environ["FUSION_SWARM_NAME"] = check_swarm_name(name)
    if key := options.swarm_key or os.environ.get("FUSION_SWARM_KEY"):
        os.environ["FUSION_SWARM_KEY"] = parse_swarm_key(key).hex()


# --- join


def _join(options: argparse.Namespace) -> int:
    import logging

    import uvloop

    logging.basicConfig(
        level=logging.INFO if options.verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    uvloop.run(_run_daemon(options, join_options(options)))
    return 0


async def _run_daemon(options: argparse.Namespace, join: JoinOptions) -> None:
    import asyncio
    import signal

    import msgspec

    from peer.daemon import Daemon
    from peer.preflight import lines

    def say(event: object, text: str) -> None:
        print(msgspec.json.encode(event).decode() if options.json else text, flush=True)

    def on_ready(ready: Ready) -> None:
        _tell_parent(options.ready_fd, ready)
        say(ready, _ready_text(ready, join))

    def on_findings(findings: list[Finding]) -> None:
        if not options.no_preflight:
            say({"event": "preflight", "findings": findings}, "\n".join(lines(findings)))

    def on_asked(spec: RunSpec) -> None:
        say({"event": "asked", "run": spec.run, "name": spec.name, "owner": spec.owner.hex()}, _asked_text(spec))

    def on_waiting(text: str) -> None:
        print(f"fusion-peer: {text}", file=sys.stderr, flush=True)

    daemon = Daemon(join, on_ready, on_findings, on_asked, on_waiting)
    task = asyncio.ensure_future(daemon.run())
    signals = 0

    def stop() -> None:
        nonlocal signals
        signals += 1
        if signals == 1 and daemon.joined:
            daemon.leave()
        else:
            task.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    await asyncio.wait({task})
    if not task.cancelled():
        task.result()


def _asked_text(spec: RunSpec) -> str:
    """Who asks for this machine, and what for, before anything is accepted; a stranger's words stay on their line."""
    from peer.plain import one_line

    owner = spec.owner.hex()
    what = f" ({one_line(spec.description, 200)})" if spec.description else ""
    return (
        f"run {one_line(spec.name)}{what} of owner {owner} asks for this machine; runs of chosen owners only: "
        f"--runs {owner[:16]}, none for now: fusion-peer pause"
    )


def _tell_parent(fd: int | None, ready: Ready) -> None:
    import msgspec

    if fd is None:
        return
    try:
        os.write(fd, msgspec.json.encode(ready) + b"\n")
    except BrokenPipeError:
        return  # the parent has read all that it wanted
    except OSError as error:
        print(f"fusion-peer: cannot write to --ready-fd {fd}: {error.strerror}", file=sys.stderr)


def _ready_text(ready: Ready, join: JoinOptions) -> str:
    from peer.invitation import invite_line

    if ready.event == "devices":
        return "device measured; waiting for runs (Ctrl-C leaves)"
    what = "joined the swarm" if join.bootstrap else "started a swarm; others join it with:"
    lines = [f"peer {ready.peer} {what}"]
    if not join.bootstrap:
        lines.append(f"  {invite_line(ready.addresses)}")
    lines.append(f"memory {join.memory_bytes / 2**30:.1f} GiB, {join.threads} threads, {', '.join(join.devices)}")
    return "\n".join(lines)


# --- the running peer


def _ask(options: argparse.Namespace) -> int:
    import msgspec

    from dht.home import home
    from peer.errors import ControlError
    from peer.local_control import ask

    status = ask(home(), options.command)
    if options.json:
        print(msgspec.json.encode(status).decode())
    elif options.command == "invite":
        if not status.invite:
            raise ControlError("the running peer is of an older version; start it again with: fusion-peer join")
        print(status.invite)
    else:
        print(_status_text(status))
    return 0


def _status_text(status: PeerStatus) -> str:
    others = "board not read yet" if status.peers is None else f"peers on the board: {status.peers}"
    lines = [f"peer {status.peer} ({status.name}): {status.state}, up {status.uptime_s:.0f} s, {others}"]
    if status.swarm or status.private:
        words = (f"swarm {status.swarm}" if status.swarm else "a swarm without a name", ", private" * status.private)
        lines.append(f"  {''.join(words)}")
    if status.fence:
        leads = "led by this peer" if status.leader == status.peer else f"led by ..{status.leader[-8:]}"
        lines.append(f"  fence {status.fence}, {leads}")
    if status.paused_for:
        lines.append(f"  paused: {status.paused_for}")
    if status.rests_at:
        lines.append(f"  cannot be dialled; reached by way of {', '.join(status.rests_at)}")
    elif status.reach in ("relay", "none"):
        lines.append("  cannot be dialled, and no peer offers a pipe: fusion-peer doctor says what mends it")
    if status.pipes or status.piped_bytes:
        lines.append(f"  carries {status.pipes} pipes for others, {status.piped_bytes / 1e6:.1f} MB since it started")
    if status.warning:
        lines.append(f"  WARNING: {status.warning}")
    for d in status.devices:
        rate = f"{d.flops_per_s / 1e9:.0f} GFLOP/s, {d.memory_bytes_per_s / 1e9:.1f} GB/s" if d.flops_per_s else d.state
        lines.append(
            f"  {d.device}: {rate}, {d.resident_bytes / 2**30:.2f} of {d.cap_bytes / 2**30:.2f} GiB, executor {d.pid}"
        )
    for s in status.stages:
        waits = f", waits for {s.waiting_for}" if s.waiting_for else ""
        sent = f"tick {s.tick}, {s.bytes_sent / 1e6:.1f} MB sent{waits}"
        lines.append(f"  stage {s.stage} of {s.name} (owner {s.owner[:16]}): {sent}")
    return "\n".join(lines)


def _purge(options: argparse.Namespace) -> int:
    import json
    import shutil

    from dht.home import home
    from peer.errors import ControlError
    from peer.local_control import ask

    folder = home()
    try:
        ask(folder, "status")
    except ControlError:
        pass
    else:
        raise ControlError("a peer is running with this state folder; end it first: fusion-peer leave")
    freed = 0
    for path in (folder / "blobs", folder / "runs"):
        freed += sum(p.stat().st_size for p in path.rglob("*") if p.is_file()) if path.is_dir() else 0
        shutil.rmtree(path, ignore_errors=True)
    if options.json:
        print(json.dumps({"removed_bytes": freed, "home": str(folder)}))
    else:
        print(f"removed {freed / 2**20:.1f} MiB held for others; {folder / 'identity'} is kept")
    return 0


def _bench(options: argparse.Namespace) -> int:
    import msgspec
    import torch

    from dht.home import home
    from fusion_p2p.estimator import kept_tables
    from peer import devices

    if options.threads:
        torch.set_num_threads(options.threads)
    figures = [devices.measure(name) for name in devices.device_names(options.device)]
    tables = [t for f in figures for t in kept_tables(home() / devices.OPERATORS, f.device, f.name)]
    if options.json:
        found = [
            msgspec.structs.asdict(f) | {"operators": [t for t in tables if t.device == f.device]} for f in figures
        ]
        print(msgspec.json.encode(found).decode())
        return 0
    for f in figures:
        print(
            f"{f.device} ({f.name}): {f.flops_per_s / 1e9:.1f} GFLOP/s fp32, "
            f"{f.memory_bytes_per_s / 1e9:.1f} GB/s copy, {f.memory_bytes / 2**30:.1f} GiB"
        )
        for t in tables:
            if t.device == f.device:
                print("\n".join(_operator_lines(t)))
    return 0


def _operator_lines(t: OpTable) -> list[str]:
    """What runs had this device time, the slowest first."""
    slowest = sorted(t.times.values(), key=lambda o: -(o.forward_s + o.backward_s))[:SLOWEST]
    lines = [f"  {len(t.times)} operator calls timed for runs with torch {t.build}, the slowest:"]
    return lines + [f"    {o.what}: {o.forward_s * 1e3:.3g} ms, backward {o.backward_s * 1e3:.3g} ms" for o in slowest]


if __name__ == "__main__":
    sys.exit(main())
