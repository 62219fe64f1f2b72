"""A real browser for the monitor's tests: Debian's chromium, driven by selenium."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

PATIENT_S = 240.0
TRIES = 3
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars",
)  # fmt: skip


def need_browser() -> None:
    """Skips, and says why, where there is no browser."""
    pytest.importorskip("selenium", reason="selenium is not installed")
    pytest.importorskip("starlette", reason="the extra 'web' is not installed")
    pytest.importorskip("uvicorn", reason="the extra 'web' is not installed")
    for program in ("chromium", "chromedriver"):
        if shutil.which(program) is None:
            pytest.skip(f"no {program} here; .ci/browser installs it")


@contextlib.contextmanager
def browser(width: int = 1400, height: int = 900, *, dark: bool = False) -> Iterator[Any]:
    """A fresh chromium of this size; console and network events are logged."""
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    with tempfile.TemporaryDirectory(prefix="fusion-browser-") as profile:
        options = Options()
        options.binary_location = shutil.which("chromium") or ""
        for flag in (*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        driver = _started(lambda: webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver"))))
        try:
            driver.set_page_load_timeout(PATIENT_S)
            driver.set_script_timeout(PATIENT_S)
            metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
            scheme = {"features": [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]}
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", scheme)
            yield driver
        finally:
            driver.quit()


def _started(start: Callable[[], Any]) -> Any:
    """chromedriver gives chromium a minute to come up; where the machine is too busy for it another try may do."""
    from selenium.common.exceptions import WebDriverException

    for _ in range(TRIES - 1):
        with contextlib.suppress(WebDriverException):
            return start()
    return start()


def pictures_folder() -> Path:
    """Where screenshots are kept: $FUSION_TEST_OUTPUT, else tests/output."""
    folder = Path(os.environ.get("FUSION_TEST_OUTPUT") or Path(__file__).parents[1] / "output") / "monitor"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
