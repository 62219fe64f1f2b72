"""Which failures `make test` tries once more."""

from __future__ import annotations

from tests.alone import MOST, refusal

CLUSTER = [f"tests/cluster/test_train.py::test_{k}" for k in range(MOST + 1)]


def test_a_few_with_processes_are_tried_alone() -> None:
    assert refusal(CLUSTER[:MOST]) == ""
    assert refusal(["tests/netlab/test_lab.py::test_x[1]"]) == ""


def test_nothing_else_is() -> None:
    assert "no test failed" in refusal([])
    assert "at most" in refusal(CLUSTER)
    for where in ("unit", "sim", "adversarial", "golden"):
        assert f"tests/{where}/test_a.py::test_b failed" in refusal([*CLUSTER[:1], f"tests/{where}/test_a.py::test_b"])
