"""`fusion-monitor web` in a real browser, over a real swarm on loopback whose run goes on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from dht.records import TTL_S
from tests.cluster import monitor_swarm
from tests.cluster.eventually import WITHIN_S, until
from tests.cluster.monitor_browser import browser, need_browser, pictures_folder
from tests.cluster.monitor_swarm import Swarm

pytestmark = pytest.mark.timeout(900)

STEP = ".figures span:nth-child(2) b"


class Scene:
    """A swarm, the monitor's process and a peer's process, on an event loop in a thread."""

    def __init__(self) -> None:
        self.swarm: Swarm
        self.url = ""
        self.victim = ""
        self.victim_pid = 0
        self.killed_at = 0.0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def call(self, work: Coroutine[Any, Any, Any], timeout_s: float = 400.0) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    @contextlib.contextmanager
    def running(self, folder: Path) -> Iterator[Scene]:
        self._thread.start()
        stop: asyncio.Event
        ready = threading.Event()
        failure: list[BaseException] = []

        async def play() -> None:
            nonlocal stop
            stop = asyncio.Event()
            async with monitor_swarm.swarm(folder) as self.swarm:
                swarm = self.swarm
                swarm.add_peers(14)
                swarm.add_fences()
                swarm.step = 20
                swarm.start_run([1, 4, 7, 5], total=100_000)  # never done, however long this takes
                await swarm.board.flush(timeout_s=WITHIN_S)
                peer = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "tests.cluster.monitor_peer", swarm.address,
                    stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[2], start_new_session=True,
                )  # fmt: skip
                assert peer.stdout is not None
                async with asyncio.timeout(WITHIN_S):
                    self.victim = (await peer.stdout.readline()).decode().strip()
                self.victim_pid = peer.pid
                monitor, self.url = await monitor_swarm.start_monitor(swarm.address, folder, "--every", "1")
                advancing = asyncio.create_task(self._advance())
                ready.set()
                try:
                    await stop.wait()
                finally:
                    advancing.cancel()
                    monitor.send_signal(signal.SIGTERM)
                    async with asyncio.timeout(WITHIN_S):
                        assert await monitor.wait() == 0
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(self.victim_pid, signal.SIGKILL)
                    await peer.wait()

        playing = asyncio.run_coroutine_threadsafe(play(), self._loop)
        playing.add_done_callback(lambda f: (failure.extend([e] if (e := f.exception()) else []), ready.set()))
        assert ready.wait(700)
        if failure:
            raise failure[0]
        try:
            yield self
        finally:
            self._loop.call_soon_threadsafe(stop.set)
            playing.result(400)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)
            self._loop.close()

    def kill_the_victim(self) -> None:
        """In one test; its end is looked for in a later one, so that nobody waits for a TTL."""
        os.killpg(self.victim_pid, signal.SIGKILL)
        self.killed_at = time.time()

    async def _advance(self) -> None:
        while True:
            await asyncio.sleep(1.5)
            self.swarm.advance(3)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    need_browser()
    with Scene().running(tmp_path_factory.mktemp("monitor")) as running:
        yield running


@pytest.fixture(scope="module")
def desktop(scene: Scene) -> Iterator[Any]:
    with browser() as driver:
        yield driver


def js(driver: Any, script: str) -> Any:
    return driver.execute_script(f"return {script}")


def text(driver: Any, selector: str) -> str:
    return str(js(driver, f"document.querySelector({selector!r})?.innerText ?? ''"))


def number(driver: Any, selector: str) -> float:
    """What is shown there; not a number (and so neither more nor less than any) while nothing is."""
    shown = text(driver, selector).replace(",", "")
    return float(shown) if shown.replace(".", "", 1).isdigit() else math.nan


def reads(driver: Any, selector: str, *words: str) -> None:
    """All of it is shown there: parts of a run are records of their own, which may come one look later."""
    for word in words:
        until(lambda word=word: word in text(driver, selector), f"{word!r} in {selector}")


def open_page(driver: Any, scene: Scene, path: str = "") -> None:
    driver.get("about:blank")
    driver.get(f"{scene.url}{path}")
    until(lambda: js(driver, "document.documentElement.dataset.ready"), "the page is ready")


def keys(driver: Any, *pressed: str) -> None:
    from selenium.webdriver import ActionChains

    ActionChains(driver).send_keys(*pressed).perform()


def complaints(driver: Any) -> list[str]:
    return [e["message"] for e in driver.get_log("browser") if e["level"] in ("SEVERE", "WARNING")]


def shot(driver: Any, name: str) -> None:
    assert driver.save_screenshot(str(pictures_folder() / f"{name}.png"))


def run_path(scene: Scene) -> str:
    assert scene.swarm.run is not None
    return f"#/run/{scene.swarm.run.run}"


def test_the_page_loads_clean_and_asks_nobody_else(scene: Scene, desktop: Any) -> None:
    open_page(desktop, scene)
    until(lambda: js(desktop, "document.getElementById('map').dataset.peers") == "15", "15 peers on the map")
    until(lambda: js(desktop, "document.getElementById('map').dataset.fences") == "3", "3 fences on the map")
    until(lambda: int(js(desktop, "document.getElementById('map').dataset.flows") or 0) >= 7, "tensor links on the map")
    until(lambda: js(desktop, "document.querySelectorAll('.uplot').length") == 2, "two curves")
    shot(desktop, "overview")
    assert complaints(desktop) == []
    asked = []
    for entry in desktop.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent" and message["params"]["documentURL"].startswith("http"):
            asked.append(message["params"]["request"]["url"])
    assert len(asked) > 10 and [u for u in asked if not u.startswith(scene.url)] == []
    headers = js(desktop, "fetch('/').then((r) => r.headers.get('content-security-policy'))")
    assert "default-src 'none'" in headers and "unsafe" not in headers
    page = js(desktop, "fetch('/api/picture').then((r) => r.text())")
    assert "198.51.100" not in page and "/ip4/" not in page and "127.0.0.1" not in page  # no peer's address


def test_the_loss_of_a_live_run_advances(scene: Scene, desktop: Any) -> None:
    open_page(desktop, scene)
    first = until(lambda: text(desktop, ".run-loss"), "a loss")
    step = until(lambda: number(desktop, STEP) > 0 and number(desktop, STEP), "the step")
    until(lambda: text(desktop, ".run-loss") not in ("", first), "another loss")
    until(lambda: number(desktop, STEP) > step, "more steps")
    until(lambda: text(desktop, "#status-text") == "live", "it says live")


def test_pages_of_a_run_a_peer_a_fence_and_contribution(scene: Scene, desktop: Any) -> None:
    open_page(desktop, scene, run_path(scene))
    until(lambda: js(desktop, "document.querySelectorAll('.strip .stage').length") == 4, "four stages")
    reads(desktop, ".why", "stage 1 computes 1.8 s of a 2.1 s step")
    reads(desktop, ".stage.bound", "slowest", "Stage 1")
    links = "topk-masked:0.01", "≈ 8×", "≈ 50×", "dense would take 3.2 s, 0.4 s allowed"
    reads(desktop, "#page-other table", *links)
    until(lambda: js(desktop, "document.querySelectorAll('.uplot').length") == 2, "the run's curves")
    shot(desktop, "run")
    leader = scene.swarm.peers[0].peer_id
    open_page(desktop, scene, f"#/peer/{leader}")
    until(lambda: "900 Mbit/s" in text(desktop, "#page-other"), "the peer's measured links")
    reads(desktop, "#page-other", "trainer of", "60 GFLOP/s", "leads its fence", "direct", "northern Spain")
    shot(desktop, "peer")
    open_page(desktop, scene, f"#/fence/{monitor_swarm.FENCES[0]}")
    until(lambda: "940 Mbit/s" in text(desktop, "#page-other"), "the fence's summary")
    shot(desktop, "fence")
    open_page(desktop, scene, "#/work")
    until(lambda: "TFLOP" in text(desktop, "#page-other table"), "work counted by receipts")
    shot(desktop, "contribution")
    assert complaints(desktop) == []


def test_by_keyboard_alone(scene: Scene, desktop: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    open_page(desktop, scene)
    keys(desktop, Keys.TAB)
    assert js(desktop, "document.activeElement.className") == "skip"
    keys(desktop, "3")
    until(lambda: "Peers" in text(desktop, "#page-other h1"), "the peers' page")
    keys(desktop, "m")
    until(lambda: js(desktop, "document.activeElement.id") == "map", "focus on the map")
    keys(desktop, Keys.ARROW_RIGHT)
    first = until(lambda: text(desktop, "#map-said"), "a peer is named")
    keys(desktop, Keys.ARROW_RIGHT)
    until(lambda: text(desktop, "#map-said") != first, "the next peer is named")
    keys(desktop, Keys.ENTER)
    until(lambda: js(desktop, "location.hash").startswith("#/peer/"), "the peer's page")
    keys(desktop, "?")
    assert until(lambda: js(desktop, "document.getElementById('keys').open"), "the list of keys")
    keys(desktop, Keys.ESCAPE)
    until(lambda: not js(desktop, "document.getElementById('keys').open"), "the list is gone")
    keys(desktop, Keys.ESCAPE)
    until(lambda: js(desktop, "location.hash") == "#/", "the overview")


def test_the_scrubber_goes_back(scene: Scene, desktop: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    open_page(desktop, scene)
    until(lambda: int(js(desktop, "document.getElementById('when').max")) > 5, "some history")
    now = until(lambda: number(desktop, STEP) > 0 and number(desktop, STEP), "the step")
    keys(desktop, "h", Keys.HOME, Keys.ARROW_RIGHT)
    until(lambda: "History: the swarm at" in text(desktop, "#notes"), "it says that this is history")
    until(lambda: number(desktop, STEP) < now, "an earlier step")
    until(lambda: js(desktop, "document.getElementById('map').dataset.peers") != "0", "the peers of then")
    until(lambda: text(desktop, "#status-text") == "history", "it says history")
    shot(desktop, "history")
    keys(desktop, "l")
    until(lambda: text(desktop, "#status-text") == "live", "live again")
    assert complaints(desktop) == []


def test_another_address_is_a_choice_with_a_warning(scene: Scene, tmp_path: Path) -> None:
    async def warned() -> str:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "dht.cli_monitor", "web", "--swarm", scene.swarm.address, "--host", "0.0.0.0",
            "--port", "0", "--history", "none", stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "FUSION_HOME": str(tmp_path)},
        )  # fmt: skip
        assert process.stderr is not None
        try:
            async with asyncio.timeout(WITHIN_S):
                return (await process.stderr.readline()).decode()
        finally:
            process.terminate()
            await process.wait()

    assert "warning: 0.0.0.0 is not this machine alone" in scene.call(warned())


def test_a_narrow_screen_and_dark_mode(scene: Scene) -> None:
    assert json.loads(urllib.request.urlopen(f"{scene.url}api/picture", timeout=WITHIN_S).read())["error"] is None
    scene.kill_the_victim()
    with browser(390, 844, dark=True) as phone:
        for path, name in (("", "overview"), (run_path(scene), "run"), ("#/peers", "peers")):
            open_page(phone, scene, path)
            until(lambda: text(phone, "main"), "the page")
            shot(phone, f"phone-dark-{name}")
            assert js(phone, "document.documentElement.scrollWidth") <= 390, name
        background = js(phone, "getComputedStyle(document.body).backgroundColor")
        assert max(int(c) for c in background[4:-1].split(",")) < 60
        keys(phone, "d")
        until(lambda: js(phone, "getComputedStyle(document.body).backgroundColor") != background, "the other theme")
        assert complaints(phone) == []


def test_hostile_records_change_nothing_but_a_warning(scene: Scene, desktop: Any) -> None:
    swarm = scene.swarm
    script = "<img src=x onerror=window.pwned=1>"
    mallory = monitor_swarm.identity(666)

    async def attack() -> None:
        from dht.records import Device, PeerRecord, RunRecord, Signer, Work, run_id
        from dht.runs import RunView

        assert swarm.run is not None
        device = Device(
            kind="<b>gpu",
            name=script,
            flops_per_s=1e21,
            memory_bytes_per_s=1e21,
            memory_bytes=1 << 60,
            free_bytes=1 << 60,
        )
        work = (Work(swarm.run.run, 2),)
        record = PeerRecord(
            peer=mallory.peer_id, version="\u202eevil\u202d", devices=(device,), hours=script[:32], work=work
        )
        swarm.board.publish(record, Signer(mallory))
        name = swarm.run.name  # another owner's run under a known name
        false = RunRecord(
            run=run_id(mallory.public_key, name, script, 7, 1.5), owner=mallory.public_key, name=name,
            opdag_hash=script, seed=7, created=1.5, trainer=mallory.peer_id, state="training",
            reason=f"\u2066{script}\x1b[31m", step=1 << 53, total=1 << 53, loss=1e30, step_time_s=1e11,
            tokens_per_s=1e21,
        )  # fmt: skip
        swarm.board.publish_run(RunView(run=false), Signer(mallory))
        await swarm.board.flush(timeout_s=WITHIN_S)

    scene.call(attack())
    open_page(desktop, scene)
    until(lambda: js(desktop, "document.getElementById('map').dataset.peers") == "16", "the hostile peer on the map")
    until(lambda: "hold things that do not belong there" in text(desktop, "#notes"), "a warning")
    shot(desktop, "hostile")
    open_page(desktop, scene, "#/peers")
    until(lambda: "onerror" in text(desktop, "#page-other"), "its words, as words")
    assert js(desktop, "window.pwned") is None
    assert js(desktop, "document.querySelectorAll('main img, main script').length") == 0
    assert "\u202e" not in js(desktop, "document.body.innerText")
    open_page(desktop, scene, f"#/peer/{mallory.peer_id}")
    until(lambda: "beyond reason" in text(desktop, "#page-other"), "the peer's page says why")
    reads(desktop, "#page-other", "by its own word")
    open_page(desktop, scene, run_path(scene))
    until(lambda: js(desktop, "document.querySelectorAll('.strip .stage').length") == 4, "the true run's own stages")
    assert mallory.peer_id[-8:] not in text(desktop, ".strip")
    open_page(desktop, scene, "#/runs")
    until(lambda: text(desktop, "#page-other").count("gpt2-bible") == 2, "both runs")
    assert "e+" not in text(desktop, "#page-other")
    assert complaints(desktop) == []


def test_forged_signatures_are_refused_and_told(scene: Scene, desktop: Any) -> None:
    swarm = scene.swarm
    victim, mallory = monitor_swarm.identity(668), monitor_swarm.identity(667)

    async def attack() -> None:
        from dht.records import PeerRecord, RunRecord, run_id

        swarm.forge(PeerRecord(peer=victim.peer_id, version="9", devices=()), victim, mallory)
        assert swarm.run is not None
        name, owner = "gpt2-stolen", swarm.owner.public_key
        false = RunRecord(
            run=run_id(owner, name, "ab" * 32, 7, 2.5), owner=owner, name=name, opdag_hash="ab" * 32, seed=7,
            created=2.5, trainer=mallory.peer_id, state="training",
        )  # fmt: skip
        swarm.forge(false, swarm.owner, mallory)

    open_page(desktop, scene)
    seen = "document.getElementById('map').dataset.peers"
    peers = until(lambda: js(desktop, seen), "the map")

    def warned() -> bool:
        """What is forged lives for 40 s, in which a busy machine may not look."""
        nonlocal laid
        if time.monotonic() - laid > 20.0:
            scene.call(attack())
            laid = time.monotonic()
        return "refused so far: forged" in text(desktop, "#notes")

    laid = -math.inf
    until(warned, "a warning")
    shot(desktop, "forged")
    assert js(desktop, seen) == peers
    open_page(desktop, scene, f"#/peers?find={victim.peer_id.lower()}")
    until(lambda: "0 of " in text(desktop, "#page-other"), "nobody of that name")
    open_page(desktop, scene, "#/runs")
    until(lambda: "gpt2-bible" in text(desktop, "#page-other"), "the true run")
    assert "gpt2-stolen" not in text(desktop, "#page-other")
    assert complaints(desktop) == []


def test_a_killed_peer_shows_within_one_ttl_with_its_event(scene: Scene, desktop: Any) -> None:
    if not scene.killed_at:  # run alone
        scene.kill_the_victim()
    open_page(desktop, scene)

    def is_red() -> bool:
        """Every look of the observer after one TTL says so, however seldom a busy machine lets it look."""
        picture = json.loads(urllib.request.urlopen(f"{scene.url}api/picture", timeout=WITHIN_S).read())
        (state,) = [p["state"] for p in picture["peers"] if p["peer"] == scene.victim]
        assert state == "silent" or picture["error"] or picture["time"] <= scene.killed_at + TTL_S
        return bool(js(desktop, "document.getElementById('map').dataset.silent") == "1")

    until(is_red, "a red peer", TTL_S + WITHIN_S)
    until(lambda: f"..{scene.victim[-8:]} is silent" in text(desktop, ".events"), "its event")
    shot(desktop, "killed")
    asked = f"fetch('/api/events?peer={scene.victim}').then((r) => r.json())"
    silent = [e for e in js(desktop, asked) if "is silent" in e["text"] and e["time"] > scene.killed_at]
    assert len(silent) == 1
    open_page(desktop, scene, f"#/peer/{scene.victim}")
    until(lambda: "is silent" in text(desktop, "#page-other .events"), "its event on its own page")
    assert complaints(desktop) == []
