"""What `fusion-run codecs` prints of a probe."""

from __future__ import annotations

from fusion_p2p.probe import Measured
from peer.cli_codecs import table


def measured(codec: str, size: float, loss: float) -> Measured:
    return Measured(
        codec=codec, forward_bytes=size, backward_bytes=size, dense_bytes=1000, encode_s_per_element=1e-9,
        decode_s_per_element=1e-9, error=0.1, loss_cost=loss,
    )  # fmt: skip


PROBE = (
    measured("int8", 260, 0.0001),
    measured("rotated:4/2", 140, 0.03),
    measured("transform:2/1", 70, 0.006),
    measured("topk-masked:0.01", 4, 0.6),
)


def test_marks_say_what_is_chosen_from_and_what_costs_too_much() -> None:
    lines = table(PROBE)
    marks = {line[2:].split()[0]: line[0] for line in lines if line[2:3].islower() and "x " in line and "ns" in line}
    assert marks == {"int8": "*", "rotated:4/2": " ", "transform:2/1": "*", "topk-masked:0.01": "+"}
    assert "+0.60%" in next(line for line in lines if "transform:2/1" in line)
    assert "more than 2% of the loss" in lines[-1] and '"adatopk:60" allows topk-masked:0.01' in lines[-1]


def test_a_configuration_may_allow_more() -> None:
    lines = table(PROBE, "adatopk:70")
    assert any(line.startswith("* topk-masked:0.01") for line in lines)
    assert not any(line.startswith("+") for line in lines)
    assert table(PROBE, "int8") == table(PROBE)
