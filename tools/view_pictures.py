"""`python -m tools.view_pictures`: the pictures of docs/view.md, of a real deployment that answers real requests.

Starts `baton serve --prefill 1 --decode 2` with the demo model, sends streamed requests of several clients, and
photographs the pages in Chromium. Needs Debian's chromium and the extra `view-tests`.
"""

import json
import random
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

PICTURES = Path(__file__).parents[1] / "docs" / "images"
PORT = 8931
COMMAND = [
    str(Path(sys.executable).with_name("baton")),
    "serve",
    "--prefill",
    "1",
    "--decode",
    "2",
    "--port",
    str(PORT),
]
CLIENTS = 3
START_S = 240.0
TRAFFIC_S = 75.0
DESKTOP: Any = {"width": 1280, "height": 860}
PHONE: Any = {"width": 390, "height": 844}
WORDS = (__doc__ or "").split()


@contextmanager
def deployment() -> Iterator[str]:
    """Serve within the block; yield the address of the view."""
    process = subprocess.Popen(COMMAND, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        view = ""
        for line in process.stdout:
            if found := re.search(r"View\s+(http://\S+)", line):
                view = found[1]
            if line.startswith("Try it"):
                break
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield view
    finally:
        process.terminate()
        process.wait(START_S)


def send_requests(stop: threading.Event, number: int) -> None:
    """Ask one question after the other; half of them begin alike, so that their prefix is cached."""
    chance = random.Random(number)
    while not stop.is_set():
        words = chance.choices(WORDS, k=chance.choice((20, 60, 300, 900)))
        content = ("Answer in a few words. " * 20 if chance.random() < 0.5 else "") + " ".join(words)
        body = {
            "model": "smollm2",
            "messages": [{"role": "user", "content": content}],
            "max_tokens": chance.randint(20, 120),
            "stream": True,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{PORT}/v1/chat/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            reply.read()


def take(view: str) -> None:
    """Photograph the pages while requests run."""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium") or "/usr/bin/chromium", args=["--no-sandbox"]
        )

        def opened(path: str, size: Any) -> Any:
            page = browser.new_context(viewport=size, device_scale_factor=1).new_page()
            page.goto(f"{view}#/{path}")
            page.wait_for_selector("#live[data-state=live]")
            page.wait_for_timeout(4000)
            return page

        opened("topology", DESKTOP).screenshot(path=PICTURES / "view-topology.png")
        opened("topology", PHONE).screenshot(path=PICTURES / "view-phone.png")
        chat = opened("chat", DESKTOP)
        chat.get_by_role("textbox", name="Message").fill("Name three things that one sees at the sea.")
        chat.keyboard.press("Enter")
        chat.get_by_role("button", name="Show its timeline").wait_for(timeout=60_000)
        chat.wait_for_timeout(2000)
        chat.screenshot(path=PICTURES / "view-chat.png")
        opened("latency", DESKTOP).screenshot(path=PICTURES / "view-latency.png")
        for size, name in ((DESKTOP, "view-request.png"), (PHONE, "view-phone-request.png")):
            page = opened("requests", size)
            page.locator("tbody tr button.open").nth(3).click()
            page.wait_for_timeout(2000)
            page.screenshot(path=PICTURES / name)
        browser.close()


def main() -> None:
    """Take all pictures."""
    stop = threading.Event()
    with deployment() as view:
        clients = [threading.Thread(target=send_requests, args=(stop, number)) for number in range(CLIENTS)]
        for client in clients:
            client.start()
        try:
            time.sleep(TRAFFIC_S)
            take(view)
        finally:
            stop.set()
            for client in clients:
                client.join()


if __name__ == "__main__":
    main()
