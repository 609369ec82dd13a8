"""Debian's Chromium, driven by Selenium: one window, without a network, whose console is watched."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

BROWSER, DRIVER = "chromium", "chromedriver"
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
    "--enable-precise-memory-info",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
OWNED = "return window.__owned === undefined && document.querySelectorAll('iframe,img,object,embed,base').length === 0"


def is_here() -> bool:
    return None not in (shutil.which(BROWSER), shutil.which(DRIVER), find_spec("selenium"))


@contextmanager
def chromium(profile: Path) -> Iterator[Page]:
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    profile.mkdir(parents=True, exist_ok=True)
    options = ChromeOptions()
    options.binary_location = str(shutil.which(BROWSER))
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Chrome(options=options, service=Service(str(shutil.which(DRIVER)), log_output=str(profile / "driver.log")))
    try:
        driver.set_page_load_timeout(60)
        driver.set_script_timeout(60)
        yield Page(driver)
    finally:
        driver.quit()


class Page:
    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, address: str) -> None:
        self.driver.get("about:blank")
        self.take_console()
        self.take_requests()
        self.driver.get(address)
        self.until("return document.documentElement.dataset.drawn > 0")

    def go(self, view: str) -> None:
        drawn = self.run("return document.documentElement.dataset.drawn")
        if self.run("return location.hash") == view:
            return
        self.run("location.hash = arguments[0]", view)
        self.until("return document.documentElement.dataset.drawn > arguments[0]", int(drawn))

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def until(self, script: str, *arguments: Any, timeout: float = 60) -> Any:
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.driver, timeout, poll_frequency=0.02).until(lambda _: self.run(script, *arguments))

    def press(self, *keys: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    @property
    def text(self) -> str:
        return self.run("return document.body.innerText")

    def size(self, width: int, height: int = 900) -> None:
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
        )

    def picture(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.driver.save_screenshot(str(path))

    def take_console(self) -> list[str]:
        """The console messages, including violations of the content security policy."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def take_requests(self) -> list[str]:
        events = (json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance"))
        return [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
