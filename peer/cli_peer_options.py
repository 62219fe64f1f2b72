"""What `fusion-peer` can be told: its parser, and the checked options of `join`. Loads nothing heavy for the former."""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dht.command_line import Parser, between

if TYPE_CHECKING:
    from peer.daemon import JoinOptions

EXIT_CODES = """\
exit codes:
  0    done; the peer left cleanly
  1    something failed; the line on stderr says what
  2    bad input: an unknown option, a malformed or dead address, a port or an identity in use, no running peer
  130  Ctrl-C (of join: 0, for it leaves cleanly)
"""
JOIN_TEXT = """\
Offers this machine to a swarm until Ctrl-C, SIGTERM or `fusion-peer leave`. Without an address it starts a swarm and
prints what others paste. Default policy: runs of any owner, at any hour, within the caps; data, labels and weights of
the runs pass through this machine, code does not.
"""


LEAST_MEMORY_BYTES = 512 << 20  # what an executor holds before any stage, and a little


_NAME_HELP = "the swarm's name; only peers that give the same one meet (default: $FUSION_SWARM_NAME, else none)"
_KEY_HELP = "key of a private swarm: 64 hex digits or a file of them (default: $FUSION_SWARM_KEY, else public)"


def parser() -> argparse.ArgumentParser:
    """The command line, for `main` and for tests."""
    top = Parser(
        prog="fusion-peer",
        description="Offers this machine's device to a swarm that trains neural networks.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_join(commands.add_parser("join", help="offer this machine", description=JOIN_TEXT))
    for name, text in (
        ("status", "what the running peer does"),
        ("invite", "print the line that others paste to join, with the key of a private swarm"),
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
    doctor.add_argument("--threads", type=_threads, metavar="N", help="CPU threads (default: all cores)")
    doctor.add_argument("--swarm-name", metavar="NAME", help=_NAME_HELP)
    doctor.add_argument("--swarm-key", metavar="KEY", help=_KEY_HELP)
    bench = commands.add_parser(
        "bench", help="measure this machine's device", description="Measures what `join` would tell the swarm."
    )
    bench.add_argument("--device", default="auto", metavar="DEVICE", help="auto, cpu, cuda:0, cuda:all (default: auto)")
    bench.add_argument("--threads", type=_threads, metavar="N", help="CPU threads (default: all cores)")
    bench.add_argument("--json", action="store_true", help="print JSON (default: lines)")
    return top


def _add_common(sub: argparse.ArgumentParser, json: str = "print JSON (default: lines)") -> None:
    sub.add_argument(
        "--home", type=Path, metavar="DIR", help="state folder (default: $FUSION_HOME, then ~/.local/share)"
    )
    sub.add_argument("--json", action="store_true", help=json)


def _add_join(sub: argparse.ArgumentParser) -> None:
    _add_common(sub, "print JSON lines, each with its event: preflight, joined, devices, asked (default: text)")
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
        help="most memory that stages and what computes them may take, 6GiB; the peer itself takes up to 0.25GiB "
        "beside (default: 80%% of what is free)",
    )
    add(
        "--threads",
        type=_threads,
        metavar="N",
        help="CPU threads that compute; sending and receiving take a part of another (default: all cores)",
    )
    add("--device", default="auto", metavar="DEVICE", help="auto, cpu, cuda:0, cuda:all (default: auto)")
    add(
        "--framework",
        choices=("torch", "jax"),
        default="torch",
        help="what runs the operators; jax: those of GPT-2, on the CPU, needs fusion-p2p[jax] (default: torch)",
    )
    add("--vram", type=_size, metavar="SIZE", help="most memory per CUDA device (default: all of it)")
    add("--upload-mbps", type=_rate, metavar="MBPS", help="upload cap in megabits per second (default: none)")
    add("--download-mbps", type=_rate, metavar="MBPS", help="download cap in megabits per second (default: none)")
    add(
        "--relay-mbps",
        type=_rate,
        metavar="MBPS",
        help="carry tensors, sealed, between peers that cannot be dialled, this much in all (default: nothing)",
    )
    add("--disk", type=_size, metavar="SIZE", help="most that snapshots of others may take on disk (default: no cap)")
    add("--monthly-gb", type=_gigabytes, metavar="GB", help="most traffic a month, both ways, in GB (default: no cap)")
    add("--hours", default="", metavar="SPAN", help="local time in which to compute, 22:00-07:00 (default: always)")
    add("--pause-on-battery", action="store_true", help="compute on mains power only (default: always)")
    add(
        "--pause-while-active",
        type=_minutes,
        default=0.0,
        metavar="MIN",
        help="compute once this machine's user has been away for MIN minutes (default: 0, always)",
    )
    add("--place", type=_place, default="", metavar="WORDS", help="roughly where, for the monitor (default: not said)")
    add("--runs", nargs="+", default=[], metavar="OWNER", help="accept only runs of these owners' keys (default: any)")
    add("--swarm-name", metavar="NAME", help=_NAME_HELP)
    add("--swarm-key", metavar="KEY", help=_KEY_HELP)
    add(
        "--config",
        type=Path,
        metavar="FILE",
        help="settings from a TOML file, one line an option: memory = '6GiB' (default: peer.toml in the state folder)",
    )
    add("--no-preflight", action="store_true", help="say nothing about ports and reachability (default: say it)")
    add("--name", default="", help="a name for this peer in its own status (default: the host's)")
    add(
        "--ready-fd",
        type=_descriptor,
        metavar="N",
        help="write JSON lines to this descriptor when joined (default: none)",
    )
    add("--beat-s", type=_seconds, default=2.0, metavar="S", help="heartbeat on streams (default: 2 s)")
    add("--dead-s", type=_seconds, default=8.0, metavar="S", help="silence after which a peer is lost (default: 8 s)")
    add(
        "--give-up-s",
        type=_seconds,
        default=0.0,
        metavar="S",
        help="end with exit code 2 when no address of the swarm has answered for S seconds (default: keep trying)",
    )
    add("--verbose", action="store_true", help="log to stderr (default: warnings only)")


_threads = between(int, 1, 1024)
_descriptor = between(int, 0, 1 << 20)
_minutes = between(float, 0, 1440, " minutes")
_seconds = between(float, 0.05, 3600, " s")
_rate = between(float, 0.01, 1e6, " Mbps")
_gigabytes = between(float, 0.01, 1e6, " GB")


def _place(text: str) -> str:
    if len(text) > 32 or any(not c.isalpha() and c not in " -,." for c in text):
        raise argparse.ArgumentTypeError(f"{text!r}: a place is at most 32 letters, as in --place 'northern Spain'")
    return text


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


def _relay(options: argparse.Namespace) -> float | None:
    from fusion_p2p.errors import InputError

    relay, upload = options.relay_mbps, options.upload_mbps
    if relay and upload and relay >= upload:
        raise InputError(f"--relay-mbps {relay:g} must be less than --upload-mbps {upload:g}, of which it is a part")
    return relay * 1e6 / 8 if relay else None


def check_framework(framework: str, devices: Sequence[str]) -> str:
    """InputError where JAX is asked for and not installed, or not on the CPU."""
    from fusion_p2p.errors import InputError

    if framework == "jax" and importlib.util.find_spec("jax") is None:
        raise InputError("--framework jax needs a package: pip install 'fusion-p2p[jax]'")
    if framework == "jax" and any(d != "cpu" for d in devices):
        raise InputError(f"--framework jax computes on the CPU, not on {', '.join(devices)}; add --device cpu")
    return framework


def join_options(options: argparse.Namespace) -> JoinOptions:
    """Checked; InputError names the option at fault."""
    from dht.addresses import check_address, check_swarm_address
    from dht.home import home
    from dht.p2p import ANY_ADDRESS, LOOPBACK
    from fusion_p2p.errors import InputError
    from peer import devices
    from peer.courtesy import Courtesy
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
        place=options.place,
        relay_bytes_per_s=_relay(options),
        courtesy=Courtesy(on_battery=options.pause_on_battery, idle_s=60 * options.pause_while_active),
        devices=names,
        framework=check_framework(options.framework, names),
        memory_bytes=memory,
        vram_bytes=options.vram or 0,
        threads=options.threads or len(os.sched_getaffinity(0)),
        upload_bytes_per_s=options.upload_mbps * 1e6 / 8 if options.upload_mbps else None,
        download_bytes_per_s=options.download_mbps * 1e6 / 8 if options.download_mbps else None,
        disk_bytes=options.disk,
        monthly_bytes=int(options.monthly_gb * 1e9) if options.monthly_gb else None,
        policy=policy,
        give_up_s=options.give_up_s,
        beat_s=options.beat_s,
        dead_s=options.dead_s,
    )
