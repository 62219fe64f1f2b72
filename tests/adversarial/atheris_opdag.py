"""Coverage-guided fuzzing of admission: `python -m tests.adversarial.atheris_opdag CORPUS -max_total_time=60`.

Whatever bytes come, `admit` answers with a graph or an AdmissionError; anything else ends the fuzzer with a crash file.
Half of the mutations keep the JSON well formed, so that they reach the checks behind the decoder.
"""

from __future__ import annotations

import copy
import pathlib
import random
import sys
from typing import Any

import atheris
import msgspec

with atheris.instrument_imports(include=["fusion_p2p"]):
    from fusion_p2p.admit import Caps, admit
    from fusion_p2p.errors import AdmissionError

from tests.tiny_gpt2 import GOLDEN

LEAVES = (0, 1, -1, 2**31, 2**63 - 1, -(2**63), 0.5, 1e308, True, None, "", "inf", "float32", "aten.mm", [], {})
CAPS = Caps(value_bytes=1 << 24, total_bytes=1 << 28, flops=10**10)


def write_corpus(folder: pathlib.Path) -> None:
    """The golden graph, and the same with few nodes."""
    folder.mkdir(exist_ok=True)
    whole = GOLDEN.read_bytes()
    (folder / "golden").write_bytes(whole)
    dag = msgspec.json.decode(whole)
    for count in (1, 5, 20):
        small = dag | {"nodes": dag["nodes"][:count]}
        (folder / f"first-{count}").write_bytes(msgspec.json.encode(small))


def spots(tree: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every element."""
    keys = tree.keys() if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    found = [(tree, k) for k in keys]
    return found + [s for k in keys for s in spots(tree[k])]


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    rng = random.Random(seed)
    try:
        tree = msgspec.json.decode(data) if rng.random() < 0.5 else None
        places = spots(tree)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        places = []
    if not places:
        mutated: bytes = atheris.Mutate(data, max_size)
        return mutated
    for _ in range(rng.choice((1, 1, 2, 4))):
        at, key = rng.choice(places)
        other, other_key = rng.choice(places)
        if isinstance(at, list) and key < len(at) and rng.random() < 0.2:
            del at[key]
        elif rng.random() < 0.5 and (isinstance(other, dict) or other_key < len(other)):
            value = copy.deepcopy(other.get(other_key) if isinstance(other, dict) else other[other_key])
            at[key if isinstance(at, dict) else min(key, len(at) - 1)] = value if at else at
        elif at:
            at[key if isinstance(at, dict) else min(key, len(at) - 1)] = rng.choice(LEAVES)
    return msgspec.json.encode(tree)[:max_size]


def one_input(data: bytes) -> None:
    try:
        admit(data, caps=CAPS)
    except AdmissionError as error:
        text = str(error)
        if "\n" in text or len(text) > 500:
            raise ValueError(f"not one short line: {text!r}") from error


if __name__ == "__main__":
    write_corpus(pathlib.Path(sys.argv[1]))
    atheris.Setup(sys.argv, one_input, custom_mutator=mutate)
    atheris.Fuzz()
