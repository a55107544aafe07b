"""A real headless Chromium (Debian's package) that opens a page, and tells its errors and requests."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from tests.support.debian_programs import require_programs

CHROMIUM, DRIVER = "/usr/bin/chromium", "/usr/bin/chromedriver"
PHONE, DESKTOP = 390, 1100  # pixels
_REPORT_IS_READY = "return document.documentElement.dataset.ready === 'true'"


def require_chromium() -> None:
    """Install Chromium unless it is there; where that is impossible, skip the test and say why."""
    require_programs((CHROMIUM, DRIVER), ("chromium", "chromium-driver"))


class Browser:
    """One window. `open` shows a page as on a first visit."""

    def __init__(self, downloads: Path) -> None:
        self.downloads = downloads
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(DRIVER))
        self._command("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(downloads))

    def open(
        self, page: Path, width: int = DESKTOP, dark: bool = False, keep: bool = False, ready: str = _REPORT_IS_READY
    ) -> None:
        """Open a file; returns when the script `ready` is true. keep: what the browser has stored for it."""
        self._command(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width == PHONE
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._command("Emulation.setEmulatedMedia", features=[scheme])
        for kind in ("browser", "performance"):
            self.driver.get_log(kind)  # forget what was before
        if not keep:
            self._command("Storage.clearDataForOrigin", origin="file://", storageTypes="local_storage")
        self.driver.get(page.as_uri())
        self.wait(ready)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def wait(self, script: str, seconds: float = 10) -> None:
        """Wait until a script returns true."""
        WebDriverWait(self.driver, seconds, 0.05).until(lambda _: self.run(script))

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element("css selector", selector)

    def find_all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements("css selector", selector)

    def click(self, selector: str) -> None:
        """Click the first such element, in the middle of the window."""
        element = self.find(selector)
        self.run("arguments[0].scrollIntoView({ block: 'center' })", element)
        element.click()

    def texts(self, selector: str) -> list[str]:
        """The text of every element, also of hidden ones."""
        script = "return [...document.querySelectorAll(arguments[0])].map((each) => each.textContent)"
        found: list[str] = self.run(script, selector)
        return found

    def fill(self, selector: str, text: str) -> None:
        """Replace the text of a box, as a person who types."""
        box = self.find(selector)
        box.send_keys(Keys.CONTROL, "a")
        box.send_keys(Keys.BACKSPACE, text)

    def choose(self, label: str, value: str) -> None:
        """Choose an option of the list with this label."""
        self.find(f'select[aria-label="{label}"] option[value="{value}"]').click()

    def press(self, *keys: str) -> None:
        """Press keys where the focus is."""
        for key in keys:
            self.driver.switch_to.active_element.send_keys(key)

    def errors(self) -> list[str]:
        """What the console has said since the page was opened."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """The addresses that were asked for since the page was opened, without data: and blob: ones."""
        entries = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        found = [
            each["params"]["request"]["url"] for each in entries if each["method"] == "Network.requestWillBeSent"
        ]
        return [address for address in found if not address.startswith(("data:", "blob:"))]

    def wait_for_download(self, name: str) -> Path:
        path = self.downloads / name
        WebDriverWait(self.driver, 10, 0.05).until(lambda _: path.exists())
        return path

    def _command(self, name: str, **parameters: Any) -> None:
        self.driver.execute_cdp_cmd(name, parameters)


@contextmanager
def open_browser(downloads: Path) -> Iterator[Browser]:
    require_chromium()
    browser = Browser(downloads)
    try:
        yield browser
    finally:
        browser.driver.quit()
