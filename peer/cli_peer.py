"""`fusion-peer`: offer this machine to a swarm. Nothing heavy is imported before the arguments are known."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from peer.daemon import JoinOptions, Ready
    from peer.local_control import PeerStatus
    from peer.preflight import Finding

EXIT_CODES = """\
exit codes:
  0    done; the peer left cleanly
  1    something failed; the line on stderr says what
  2    bad input: an unknown option, a malformed or dead address, a port or an identity in use, no running peer
"""
JOIN_TEXT = """\
Offers this machine to a swarm until Ctrl-C, SIGTERM or `fusion-peer leave`. Without an address it starts a swarm and
prints what others paste. Default policy: runs of any owner, at any hour, within the caps; data, labels and weights of
the runs pass through this machine, code does not.
"""


LEAST_MEMORY_BYTES = 512 << 20  # what an executor holds before any stage, and a little


class _Parser(argparse.ArgumentParser):
    """Bad input is one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {' '.join(message.split())}; see {self.prog} --help\n")


_KEY_HELP = "key of a private swarm: 64 hex digits or a file of them (default: $FUSION_SWARM_KEY, else public)"


def parser() -> argparse.ArgumentParser:
    """The command line, for `main` and for tests."""
    top = _Parser(
        prog="fusion-peer",
        description="Offers this machine's device to a swarm that trains neural networks.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_join(commands.add_parser("join", help="offer this machine", description=JOIN_TEXT))
    for name, text in (
        ("status", "what the running peer does"),
        ("invite", "print the line that others paste to join"),
        ("pause", "give up all stages and take no new ones"),
        ("resume", "take stages again"),
        ("leave", "end the running peer"),
    ):
        sub = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        _add_common(sub)
    purge = commands.add_parser(
        "purge",
        help="remove the data held for others",
        description="Removes snapshots and other data held for runs of others; the identity stays. No peer may run.",
    )
    _add_common(purge)
    doctor = commands.add_parser(
        "doctor",
        help="check this machine and its network without joining",
        description="Checks device, memory, disk, clock, ports and reachability as another peer tries it, and says "
        "what mends each failure. Exit code 1 if something is to be mended.",
    )
    _add_common(doctor)
    doctor.add_argument(
        "addresses", nargs="*", metavar="ADDR", help="peers of the swarm to check against (default: the last one)"
    )
    doctor.add_argument("--listen", action="append", metavar="ADDR", help="where to listen (default: any free port)")
    doctor.add_argument("--memory", type=_size, metavar="SIZE", help="what join would be told (default: 80%% of free)")
    doctor.add_argument("--device", default="auto", metavar="DEVICE", help="auto, cpu, cuda:0 (default: auto)")
    doctor.add_argument("--threads", type=_positive, metavar="N", help="CPU threads (default: all cores)")
    doctor.add_argument("--swarm-key", metavar="KEY", help=_KEY_HELP)
    bench = commands.add_parser(
        "bench", help="measure this machine's device", description="Measures what `join` would tell the swarm."
    )
    bench.add_argument("--device", default="auto", help="auto, cpu, cuda:0, cuda:all (default: auto)")
    bench.add_argument("--threads", type=_positive, metavar="N", help="CPU threads (default: all cores)")
    bench.add_argument("--json", action="store_true", help="print JSON (default: lines)")
    return top


def _add_common(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--home", type=Path, metavar="DIR", help="state folder (default: $FUSION_HOME, then ~/.local/share)"
    )
    sub.add_argument("--json", action="store_true", help="print JSON (default: lines)")


def _add_join(sub: argparse.ArgumentParser) -> None:
    _add_common(sub)
    add = sub.add_argument
    add("addresses", nargs="*", metavar="ADDR", help="peers of the swarm, /ip4/…/tcp/…/p2p/… (default: a new swarm)")
    add(
        "--listen", action="append", metavar="ADDR", help="where to listen (default: /ip4/0.0.0.0/tcp/0, any free port)"
    )
    add("--loopback", action="store_true", help="listen on 127.0.0.1 only (default: all interfaces)")
    add(
        "--memory",
        type=_size,
        metavar="SIZE",
        help="most memory that stages may take, 6GiB (default: 80%% of what is free)",
    )
    add("--threads", type=_positive, metavar="N", help="CPU threads (default: all cores)")
    add("--device", default="auto", metavar="DEVICE", help="auto, cpu, cuda:0, cuda:all (default: auto)")
    add("--vram", type=_size, metavar="SIZE", help="most memory per CUDA device (default: all of it)")
    add("--upload-mbps", type=_rate, metavar="MBPS", help="upload cap in megabits per second (default: none)")
    add("--download-mbps", type=_rate, metavar="MBPS", help="download cap in megabits per second (default: none)")
    add("--disk", type=_size, metavar="SIZE", help="most that snapshots of others may take on disk (default: no cap)")
    add("--monthly-gb", type=_rate, metavar="GB", help="most traffic a month, both ways, in GB (default: no cap)")
    add("--hours", default="", metavar="SPAN", help="local time in which to compute, 22:00-07:00 (default: always)")
    add("--runs", nargs="+", default=[], metavar="OWNER", help="accept only runs of these owners' keys (default: any)")
    add("--swarm-key", metavar="KEY", help=_KEY_HELP)
    add(
        "--config",
        type=Path,
        metavar="FILE",
        help="settings from a TOML file, one line an option: memory = '6GiB' (default: peer.toml in the state folder)",
    )
    add("--no-preflight", action="store_true", help="say nothing about ports and reachability (default: say it)")
    add("--name", default="", help="a name for this peer in its own status (default: the host's)")
    add("--ready-fd", type=int, metavar="N", help="write JSON lines to this descriptor when joined (default: none)")
    add("--beat-s", type=_seconds, default=2.0, metavar="S", help="heartbeat on streams (default: 2 s)")
    add("--dead-s", type=_seconds, default=8.0, metavar="S", help="silence after which a peer is lost (default: 8 s)")
    add("--verbose", action="store_true", help="log to stderr (default: warnings only)")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.05 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text} must lie between 0.05 and 3600 s")
    return value


def _rate(text: str) -> float:
    value = float(text)
    if not 0.01 <= value <= 1e6:
        raise argparse.ArgumentTypeError(f"{text} must lie between 0.01 and 1000000 Mbit/s")
    return value


def _size(text: str) -> int:
    """6GiB, 500MB, 2e9."""
    units = {"": 1, "B": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
    units |= {"KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30, "TI": 1 << 40}
    bare = text.strip().upper()
    digits = bare.rstrip("BIKMGT")
    unit = bare[len(digits) :].removesuffix("B")
    try:
        value = int(float(digits) * units[unit])
    except (KeyError, ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 6GiB or 500MB") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be positive")
    return value


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
        if getattr(options, "swarm_key", None):
            from dht.door import parse_swarm_key

            os.environ["FUSION_SWARM_KEY"] = parse_swarm_key(options.swarm_key).hex()
        if options.command == "join":
            return _join(options)
        if options.command == "doctor":
            from peer import cli_doctor

            return cli_doctor.run(options)
        if options.command == "purge":
            return _purge()
        if options.command == "bench":
            return _bench(options)
        return _ask(options)
    except (DhtError, FusionError) as error:
        print(f"fusion-peer: {error}", file=sys.stderr)
        return 2 if isinstance(error, SwarmUnreachable) else error.exit_code
    except KeyboardInterrupt:
        return 130


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


def join_options(options: argparse.Namespace) -> JoinOptions:
    """Checked; InputError names the option at fault."""
    from dht.addresses import check_address, check_swarm_address
    from dht.home import home
    from dht.p2p import ANY_ADDRESS, LOOPBACK
    from fusion_p2p.errors import InputError
    from peer import devices
    from peer.daemon import JoinOptions
    from peer.policy import Policy, check_hours, check_owner

    names = devices.device_names(options.device)
    free = devices.available_memory_bytes()
    memory = options.memory or int(0.8 * free)
    if options.memory and options.memory > devices.host_memory_bytes():
        total = devices.host_memory_bytes() / 2**30
        raise InputError(f"--memory {options.memory / 2**30:.1f} GiB is more than this host has ({total:.1f} GiB)")
    if memory // len(names) < LEAST_MEMORY_BYTES:
        least = LEAST_MEMORY_BYTES >> 20
        raise InputError(
            f"--memory {memory / 2**20:.0f} MiB for {len(names)} device(s) is too little: a device's process takes "
            f"{least} MiB before any stage; give --memory 1GiB or more"
        )
    listen = tuple(map(check_address, options.listen or ())) or (LOOPBACK if options.loopback else ANY_ADDRESS)
    policy = Policy(
        owners=tuple(map(check_owner, options.runs)),
        hours=check_hours(options.hours),
        memory_bytes=memory // len(names),
    )
    if options.dead_s < 2 * options.beat_s:
        raise InputError(f"--dead-s {options.dead_s:g} must be at least twice --beat-s {options.beat_s:g}")
    return JoinOptions(
        bootstrap=tuple(map(check_swarm_address, options.addresses)),
        listen=listen,
        home=home(),
        name=options.name or os.uname().nodename,
        devices=names,
        memory_bytes=memory,
        vram_bytes=options.vram or 0,
        threads=options.threads or len(os.sched_getaffinity(0)),
        upload_bytes_per_s=options.upload_mbps * 1e6 / 8 if options.upload_mbps else None,
        download_bytes_per_s=options.download_mbps * 1e6 / 8 if options.download_mbps else None,
        disk_bytes=options.disk,
        monthly_bytes=int(options.monthly_gb * 1e9) if options.monthly_gb else None,
        policy=policy,
        beat_s=options.beat_s,
        dead_s=options.dead_s,
    )


async def _run_daemon(options: argparse.Namespace, join: JoinOptions) -> None:
    import asyncio
    import signal

    from peer.daemon import Daemon

    def on_ready(ready: Ready) -> None:
        _tell_parent(options.ready_fd, ready)
        if not options.json:
            print(_ready_text(ready, join), flush=True)

    def on_findings(findings: list[Finding]) -> None:
        if not options.json and not options.no_preflight:
            from peer.preflight import lines

            print("\n".join(lines(findings)), flush=True)

    daemon = Daemon(join, on_ready, on_findings)
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
    if ready.event == "devices":
        return "device measured; waiting for runs (Ctrl-C leaves)"
    what = "joined the swarm" if join.bootstrap else "started a swarm; others join it with:"
    lines = [f"peer {ready.peer} {what}"]
    if not join.bootstrap:
        lines.append(invite_line(ready.addresses))
    lines.append(f"memory {join.memory_bytes / 2**30:.1f} GiB, {join.threads} threads, {', '.join(join.devices)}")
    return "\n".join(lines)


def invite_line(addresses: tuple[str, ...]) -> str:
    """What others paste: every address that is not this host's own loopback, or that one if there is no other; and the
    key of a private swarm."""
    key = os.environ.get("FUSION_SWARM_KEY", "")
    outside = [a for a in addresses if "/127." not in a and "/::1/" not in a and "/quic" not in a]
    return f"  fusion-peer join {' '.join(outside[:4] or addresses[:1])}" + (f" --swarm-key {key}" if key else "")


# --- the running peer


def _ask(options: argparse.Namespace) -> int:
    import msgspec

    from dht.home import home
    from peer.local_control import ask

    status = ask(home(), options.command)
    if options.json:
        print(msgspec.json.encode(status).decode())
    elif options.command == "invite":
        print(invite_line(status.addresses).strip())
    else:
        print(_status_text(status))
    return 0


def _status_text(status: PeerStatus) -> str:
    others = "board not read yet" if status.peers is None else f"{status.peers} peers on the board"
    lines = [f"peer {status.peer} ({status.name}): {status.state}, up {status.uptime_s:.0f} s, {others}"]
    if status.fence:
        leads = "led by this peer" if status.leader == status.peer else f"led by ..{status.leader[-8:]}"
        lines.append(f"  fence {status.fence}, {leads}")
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


def _purge() -> int:
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
    print(f"removed {freed / 2**20:.1f} MiB held for others; {folder / 'identity'} is kept")
    return 0


def _bench(options: argparse.Namespace) -> int:
    import msgspec
    import torch

    from peer import devices

    if options.threads:
        torch.set_num_threads(options.threads)
    figures = [devices.measure(name) for name in devices.device_names(options.device)]
    if options.json:
        print(msgspec.json.encode(figures).decode())
        return 0
    for f in figures:
        print(
            f"{f.device} ({f.name}): {f.flops_per_s / 1e9:.1f} GFLOP/s fp32, "
            f"{f.memory_bytes_per_s / 1e9:.1f} GB/s copy, {f.memory_bytes / 2**30:.1f} GiB"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
