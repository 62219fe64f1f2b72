"""`fusion-monitor`: the swarm as its bulletin board shows it. Needs no trainer and no torch.

Imports nothing heavy before the arguments are known, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

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
    top = argparse.ArgumentParser(
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
    status.add_argument(
        "--swarm",
        metavar="ADDR[,ADDR]",
        help="addresses of the swarm (default: $FUSION_SWARM, then the swarm joined last)",
    )
    status.add_argument("--run", metavar="ID", help="only this run, by id, prefix of the id, or name (default: all)")
    status.add_argument(
        "--json", action="store_true", help="print JSON, schema 1, see dht/README.md (default: a table)"
    )
    status.add_argument(
        "--timeout", metavar="SECONDS", type=float, default=20.0, help="give up after this long (default: 20 s)"
    )
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    options = parser().parse_args(argv)
    from dht.errors import DhtError

    try:
        return _status(options)
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

    from dht.errors import InputError
    from dht.home import resolve_swarm
    from dht.monitor import as_json, as_text, take_snapshot

    if not 0 < options.timeout <= 3600:
        raise InputError(f"--timeout {options.timeout:g} is not between 0 and 3600 seconds")
    snapshot = asyncio.run(take_snapshot(resolve_swarm(options.swarm), run=options.run, timeout_s=options.timeout))
    print(as_json(snapshot) if options.json else as_text(snapshot), flush=True)
    return 4 if options.run and not any(v.run.state in ("training", "done") for v in snapshot.runs) else 0


if __name__ == "__main__":
    sys.exit(main())
