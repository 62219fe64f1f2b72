"""The web application without a socket: answers, headers, deltas, the API's description, metrics."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("starlette", reason="the extra 'web' is not installed")

from dht.errors import InputError
from dht.monitor_observer import Observer
from dht.web.api import PATHS, openapi
from dht.web.history import History
from dht.web.metrics import prometheus
from dht.web.run import history_path
from dht.web.server import Hub, delta, is_loopback, listen, make_app
from tests.dht_samples import NOW
from tests.monitor_samples import PEERS, board, sights


def get(path: str, *, host: str = "localhost", method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    """(status, headers, body) of one request to an application that has looked once."""
    answer: dict[str, Any] = {"body": b"", "headers": {}}

    async def main() -> None:
        made = board()
        hub = Hub(Observer(made), made, History(None))
        sight = await hub.observer.look()
        hub.history.keep(sight)
        hub.picture, hub.number = sight.picture, 1
        plain, _, query = path.partition("?")
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1", "method": method, "scheme": "http",
            "path": plain, "raw_path": plain.encode(), "query_string": query.encode(), "root_path": "",
            "headers": [(b"host", host.encode())], "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
        }  # fmt: skip

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                answer["status"] = message["status"]
                answer["headers"] = {k.decode(): v.decode() for k, v in message["headers"]}
            else:
                answer["body"] += message.get("body", b"")

        await make_app(hub, hosts=("localhost",))(scope, receive, send)

    asyncio.run(main())
    return answer["status"], answer["headers"], answer["body"]


@pytest.mark.parametrize("path", ["/", "/api/picture", "/static/app.js", "/metrics", "/nothing", "/api/history/at?t=0"])
def test_every_answer_has_a_strict_policy(path: str) -> None:
    _, headers, _ = get(path)
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy and "http" not in policy
    assert headers["x-content-type-options"] == "nosniff"


def test_the_page_asks_for_nothing_elsewhere() -> None:
    status, _, body = get("/")
    assert status == 200
    assert re.findall(r'(?:src|href)="(?!/|#)[^"]*"', body.decode()) == []
    assert not re.search(r"<script(?![^>]*src=)|<style|style=|\son\w+=", body.decode())


def test_other_hosts_and_methods_are_refused() -> None:
    assert get("/api/picture", host="evil.example")[0] == 400
    assert get("/api/picture", method="POST")[0] == 405


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/api/history/at?t=nan", 400, "t='nan'"),
        ("/api/history/at", 400, "t="),
        ("/api/history/at?t=5", 404, "nobody looked"),
        ("/api/runs/x/curve?points=-1", 400, "points"),
        ("/api/peers/<b>", 404, "not in the picture"),
    ],
)
def test_bad_requests_get_one_clear_line(path: str, status: int, words: str) -> None:
    found, _, body = get(path)
    assert found == status and words in json.loads(body)["error"]


def test_every_path_of_the_description_answers_as_described() -> None:
    document = openapi()
    for path, (_, answer, _) in PATHS.items():
        filled = path.replace("{run}", "ab" * 16).replace("{peer}", PEERS[0].peer_id) + (
            f"?t={NOW}" if path.endswith("/at") else ""
        )
        status, headers, body = get(filled)
        assert status == 200 and headers["content-type"] == "application/json", filled
        msgspec.json.decode(body, type=answer)
        assert path in document["paths"]
    status, _, body = get("/api/openapi.json")
    assert status == 200 and json.loads(body) == json.loads(json.dumps(document))
    refs = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert refs <= set(document["components"]["schemas"])


def test_a_delta_holds_what_changed_only() -> None:
    made = board()
    first, second = asyncio.run(sights(made, 2))
    full = delta(None, first.picture, [])
    assert full.full and len(full.peers) == 6
    later = delta(first.picture, second.picture, [])
    assert later.peers == [] and later.gone == [] and len(later.seen) == 6
    fewer = msgspec.structs.replace(second.picture, peers=second.picture.peers[1:])
    assert delta(second.picture, fewer, []).gone == [second.picture.peers[0].peer]
    assert len(msgspec.json.encode(later)) < len(msgspec.json.encode(full))


def test_metrics_are_prometheus_text() -> None:
    made = board()
    (sight,) = asyncio.run(sights(made, 1))
    run = msgspec.structs.replace(sight.picture.runs[0], name='a"b\\c\nd')
    text = prometheus(msgspec.structs.replace(sight.picture, runs=(run,)), 1.5)
    line = re.compile(r'^[a-z_]+(\{[a-z]+="(\\.|[^"\\\n])*"(,[a-z]+="(\\.|[^"\\\n])*")*\})? -?[0-9.e+-]+$')
    for row in text.strip().split("\n"):
        assert row.startswith("# ") or line.match(row), row
    assert 'fusion_peers{state="busy"} 4' in text and "fusion_run_loss" in text
    helped = {row.split()[2] for row in text.split("\n") if row.startswith("# HELP")}
    assert {row.split("{")[0].split()[0] for row in text.split("\n") if row and row[0] != "#"} == helped


MONITORING = Path(__file__).parents[2] / "examples" / "monitoring"


def labels_of_metrics() -> dict[str, set[str]]:
    (sight,) = asyncio.run(sights(board(), 1))
    found: dict[str, set[str]] = {}
    for row in prometheus(sight.picture, 1.5).splitlines():
        if not row.startswith("#"):
            name = re.split(r"[{ ]", row)[0]
            found.setdefault(name, set()).update(re.findall(r'(\w+)="', row))
    return found


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    """The classic model, grafana.com/docs/grafana/v11.0/dashboards/build-dashboards/view-dashboard-json-model: what an
    import needs, panels in a grid of 24 columns that do not overlap, queries of metrics and labels that we have."""
    board_file = json.loads((MONITORING / "grafana.json").read_text())
    assert isinstance(board_file["title"], str) and re.fullmatch(r"[\w-]{1,40}", board_file["uid"])
    assert isinstance(board_file["schemaVersion"], int) and board_file.get("id") is None
    assert set(board_file["time"]) == {"from", "to"} and re.fullmatch(r"\d+[smh]", board_file["refresh"])
    (variable,) = board_file["templating"]["list"]
    assert (variable["type"], variable["query"]) == ("datasource", "prometheus")
    known, panels, taken = labels_of_metrics(), board_file["panels"], set()
    assert len({panel["id"] for panel in panels}) == len(panels) >= 9
    for panel in panels:
        assert panel["title"] and panel["type"] in ("timeseries", "stat")
        assert panel["datasource"] == {"type": "prometheus", "uid": "${" + variable["name"] + "}"}
        assert panel["fieldConfig"]["defaults"]["unit"] in ("short", "s", "percentunit", "Bps", "flops")
        assert panel["fieldConfig"]["overrides"] == []
        grid = panel["gridPos"]
        assert grid["x"] >= 0 and grid["x"] + grid["w"] <= 24 and grid["h"] > 0
        cells = {
            (x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) > 0
        for target in panel["targets"]:
            first = re.findall(r"fusion_\w+", target["expr"])[0]
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= known[first], panel["title"]


def test_rules_name_metrics_and_labels_that_exist() -> None:
    yaml = pytest.importorskip("yaml")
    known = labels_of_metrics()
    scrape = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    assert [config["job_name"] for config in scrape["scrape_configs"]] == ["fusion"]
    assert scrape["rule_files"] == ["alerts.yml"]
    (group,) = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    assert len(group["rules"]) >= 8
    for rule in group["rules"]:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"} and rule["labels"]["severity"]
        names = re.findall(r"\bfusion_\w+", rule["expr"])
        assert set(names) <= set(known) and (names or rule["expr"].startswith('up{job="fusion"}'))
        for name, label in re.findall(r"\b(fusion_\w+)\{(\w+)=", rule["expr"]):
            assert label in known[name]
        used = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        assert not used or used <= known[names[0]]


def test_where_it_listens() -> None:
    assert is_loopback("127.0.0.1") and is_loopback("localhost") and is_loopback("::1")
    assert not is_loopback("0.0.0.0") and not is_loopback("example.org")
    with pytest.raises(InputError, match="--port"):
        listen("256.1.1.1", 80)


def test_without_the_extra_one_line_names_it(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    import sys

    from dht.cli_monitor import main

    monkeypatch.setitem(sys.modules, "dht.web.run", None)
    assert main(["web", "--swarm", "/ip4/127.0.0.1/tcp/1/p2p/" + PEERS[0].peer_id]) == 2
    assert "pip install 'fusion-p2p[web]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port", "70000"], "--port: 70000 must"),
        (["--every", "0"], "--every: 0 must"),
        (["--history-mb", "0"], "--history-mb"),
    ],
)
def test_bad_options_exit_with_2(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    from dht.cli_monitor import main

    with pytest.raises(SystemExit) as ended:
        main(["web", "--swarm", "/ip4/127.0.0.1/tcp/1/p2p/" + PEERS[0].peer_id, *arguments])
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and words in line


def test_where_history_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("FUSION_HOME", str(tmp_path))
    a, b = (f"/ip4/1.2.3.4/tcp/1/p2p/{PEERS[n].peer_id}" for n in (0, 1))
    assert history_path("none", (a,)) is None
    assert history_path(None, (a, b)) == history_path(None, (b, a)) != history_path(None, (a,))
