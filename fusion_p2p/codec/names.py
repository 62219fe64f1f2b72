"""The arguments in a codec's name."""

from __future__ import annotations

from fusion_p2p.errors import InputError


def numbers(arg: str, example: str, count: int) -> list[float]:
    """`count` positive decimals separated by slashes; InputError names the `example`."""
    parts = arg.split("/")
    if len(parts) != count or not all(p.isascii() and p.replace(".", "", 1).isdigit() and len(p) < 8 for p in parts):
        raise InputError(f"codec arguments {arg!r} are not {count} numbers; write it like {example}")
    return [float(p) for p in parts]


def density(arg: str, example: str) -> float:
    """A density in (0, 1], or a ratio above 1 ("100" is 1/100)."""
    try:
        value = float(arg)
    except ValueError:
        value = 0.0
    value = 1 / value if value > 1 else value
    if not 1e-6 <= value <= 1:
        raise InputError(f"density {arg!r} is not in (0, 1]; write it like {example}")
    return value


def bits(value: float, allowed: tuple[float, ...], name: str) -> float:
    """`value` if it is one of `allowed`."""
    if value not in allowed:
        raise InputError(f"codec {name!r} asks for {value:g} bits; use one of {', '.join(f'{b:g}' for b in allowed)}")
    return value
