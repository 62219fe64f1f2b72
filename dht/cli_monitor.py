"""`fusion-monitor`: the swarm as its bulletin board shows it. Needs no trainer and no torch.

Imports nothing heavy before the arguments are known, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Coroutine, Sequence
from typing import Any

from dht.command_line import Parser, between

EXIT_CODES = """\
exit codes:
  0  done
  1  something failed; the line on stderr says what
  2  bad input: an unknown option, a malformed address, no swarm known
  3  swarm unreachable: no address answers
  4  with --run: that run is not on the board, or is neither training nor done
"""


def parser() -> argparse.ArgumentParser:
    """The command line, for main and for tests."""
    top = Parser(
        prog="fusion-monitor",
        description="Shows a fusion-p2p swarm from its bulletin board (DHT) alone.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    status = commands.add_parser(
        "status",
        help="print peers and runs once",
        description="Prints the peers and runs of a swarm once, as a table or as JSON.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_swarm(status)
    status.add_argument("--run", metavar="ID", help="only this run, by id, prefix of the id, or name (default: all)")
    status.add_argument(
        "--json", action="store_true", help="print JSON, schema 1, see dht/README.md (default: a table)"
    )
    status.add_argument(
        "--timeout", metavar="SECONDS", type=_timeout, default=20.0, help="give up after this long (default: 20 s)"
    )
    _add_top(commands)
    _add_web(commands)
    return top


_timeout = between(float, 0.1, 3600, " s")
_every = between(float, 1, 3600, " s")
_port = between(int, 0, 65535)
_days = between(float, 0.001, 3650, " days")
_megabytes = between(int, 1, 1 << 20, " MB")


def _add_swarm(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--swarm",
        metavar="ADDR[,ADDR]",
        help="addresses of the swarm (default: $FUSION_SWARM, then the swarm joined last)",
    )


def _add_every(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--every", metavar="SECONDS", type=_every, default=5.0, help="look this often (default: 5 s)")


def _add_top(commands: Any) -> None:
    top = commands.add_parser(
        "top",
        help="watch runs, fences, peers and events in the terminal",
        description="Shows the swarm live; in plain lines where the output is not a terminal. Ctrl-C ends.",
    )
    _add_swarm(top)
    _add_every(top)


def _add_web(commands: Any) -> None:
    web = commands.add_parser(
        "web",
        help="serve the swarm as a web page, a JSON API and Prometheus metrics",
        description="Serves the page at /, its API (/api/openapi.json) and /metrics. Needs fusion-p2p[web].",
    )
    _add_swarm(web)
    _add_every(web)
    web.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine only)")
    web.add_argument("--port", type=_port, default=8317, help="port to listen on, 0 for a free one (default: 8317)")
    web.add_argument(
        "--history", metavar="FILE", help="keep history here, or 'none' (default: a file in $FUSION_HOME per swarm)"
    )
    web.add_argument("--history-days", metavar="DAYS", type=_days, default=7.0, help="forget after (default: 7 days)")
    web.add_argument(
        "--history-mb", metavar="MB", type=_megabytes, default=256, help="most that it takes (default: 256 MB)"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    options = parser().parse_args(argv)
    from dht.errors import DhtError

    try:
        return {"status": _status, "top": _top, "web": _web}[options.command](options)
    except DhtError as error:
        print(f"fusion-monitor: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output, `head` say, has seen enough
        sys.stderr.close()
        return 0


def _status(options: argparse.Namespace) -> int:
    import asyncio
    import logging

    from dht.home import resolve_swarm
    from dht.monitor import as_json, as_text, take_snapshot

    logging.getLogger("dht").setLevel(logging.ERROR)
    snapshot = asyncio.run(take_snapshot(resolve_swarm(options.swarm), run=options.run, timeout_s=options.timeout))
    print(as_json(snapshot) if options.json else as_text(snapshot), flush=True)
    if options.run and not snapshot.runs:
        print(f"fusion-monitor: run {options.run!r} is not on the board; without --run all are shown", file=sys.stderr)
    return 4 if options.run and not any(v.run.state in ("training", "done") for v in snapshot.runs) else 0


def _top(options: argparse.Namespace) -> int:
    from dht.home import resolve_swarm
    from dht.top import watch

    return _until_stopped(watch(resolve_swarm(options.swarm), every_s=options.every))


def _until_stopped(work: Coroutine[Any, Any, int]) -> int:
    import asyncio

    try:
        return asyncio.run(work)
    except asyncio.CancelledError:  # SIGTERM
        return 143


def _web(options: argparse.Namespace) -> int:
    from dht.errors import InputError
    from dht.home import resolve_swarm

    try:
        from dht.web.run import serve_swarm
    except ModuleNotFoundError as error:
        raise InputError(f"{error.name} is not installed; run: pip install 'fusion-p2p[web]'") from error
    return _until_stopped(
        serve_swarm(
            resolve_swarm(options.swarm), every_s=options.every, host=options.host, port=options.port,
            history=options.history, max_age_s=options.history_days * 86400.0, max_bytes=options.history_mb << 20,
        )
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
