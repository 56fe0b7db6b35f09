"""The page at `/`, in headless Chromium."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil

import numpy as np
import pytest
from serving import needs_server, serving

import recur
from recur import LSTM, Chain, Dense, Embedding
from recur.serve.page import PAGE

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")

pytestmark = [
    needs_server,
    pytest.mark.skipif(
        not (BROWSER and DRIVER and importlib.util.find_spec("selenium")),
        reason="needs chromium, chromedriver and the package selenium",
    ),
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage",
                     "--window-size=1000,1400",
                     f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


def wait(browser, script, seconds=20):
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, seconds, 0.05).until(
        lambda b: b.execute_script(f"return {script}")
    )


def complaints(browser, server):
    """What the browser found wrong with the pages of this server."""
    return [
        e
        for e in browser.get_log("browser")
        if e["level"] in ("SEVERE", "WARNING") and server.address in e["message"]
    ]


def painted(browser, id):
    """How many different colours a canvas shows."""
    return browser.execute_script(
        "const c = document.getElementById(arguments[0]);"
        "const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
        "const s = new Set(); for (let i = 0; i < d.length; i += 4)"
        " s.add([d[i], d[i + 1], d[i + 2], d[i + 3]].join()); return s.size",
        id,
    )


def test_the_page_takes_nothing_from_outside():
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", PAGE)
    assert not re.findall(r"https?://|@import|url\(", PAGE)


def test_a_signal_is_fed_and_seen_by_keyboard_alone(browser, tmp_path):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    with serving(tmp_path) as server:
        browser.get(server.address)
        wait(browser, "!document.getElementById('signal').hidden")
        browser.find_element(By.ID, "name").send_keys("mine", Keys.ENTER)
        wait(browser, "!document.getElementById('run').disabled")
        run = browser.find_element(By.ID, "run")
        run.send_keys(Keys.ENTER)
        wait(browser, "step >= 20")
        run.send_keys(Keys.ENTER)
        wait(browser, "sent.size === 0 && !running")
        assert "Stream mine stands at step" in browser.find_element(By.ID, "status").text
        assert painted(browser, "state") > 10 and painted(browser, "answer") > 3
        wait(browser, "document.getElementById('latency-now').textContent.endsWith('ms')")
        wait(browser, "document.getElementById('size-now').textContent.includes('of 1')")
        assert painted(browser, "latency") > 1
        browser.save_screenshot(str(tmp_path.parent / "signal.png"))
        at = browser.execute_script("return step")
        # A second page that guesses the name does not get the stream; with the token it does.
        token = browser.find_element(By.ID, "token").get_attribute("value")
        browser.get(server.address)
        wait(browser, "!document.getElementById('signal').hidden")
        browser.find_element(By.ID, "name").send_keys("mine", Keys.ENTER)
        wait(browser, "document.getElementById('error').textContent.includes('open already')")
        browser.find_element(By.ID, "token").send_keys(token, Keys.ENTER)
        wait(browser, f"step === {at}")
        reset = browser.find_element(By.ID, "reset")
        reset.send_keys(Keys.SPACE)
        wait(browser, "step === 0")
        assert complaints(browser, server) == []


def test_a_character_model_reads_what_is_typed_and_writes_on(browser, tmp_path, rng):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    letters = "\nabcde "
    size = len(letters) + 1
    chain = Chain(Embedding(size, 6, rng=rng), LSTM(6, 24, rng=rng), Dense(24, size, rng=rng))
    file = tmp_path / "letters.safetensors"
    recur.save(chain, file, metadata={"alphabet": json.dumps(list(letters))})
    with serving(tmp_path, file=file) as server:
        browser.get(server.address)
        wait(browser, "!document.getElementById('text').hidden")
        browser.find_element(By.ID, "open").send_keys(Keys.ENTER)
        wait(browser, "step === 1")
        browser.find_element(By.ID, "typed").send_keys("abc de")
        wait(browser, "step === 7 && sent.size === 0")
        assert browser.find_element(By.ID, "output").text == "abc de"
        shown = browser.find_element(By.ID, "next").text
        stream = recur.Stream(chain)
        for c in "\nabc de":
            logits = stream(letters.index(c) + 1)
        best = letters[int(np.argmax(logits[1:]))]
        assert shown.startswith(json.dumps(best))
        browser.find_element(By.ID, "write").send_keys(Keys.ENTER)
        wait(browser, "step >= 15")
        browser.find_element(By.ID, "write").send_keys(Keys.ENTER)
        wait(browser, "!writing")
        assert len(browser.find_element(By.ID, "output").text) >= 12
        browser.save_screenshot(str(tmp_path.parent / "text.png"))
        assert complaints(browser, server) == []


def test_every_control_has_a_name_and_is_reached_by_tab(browser, tmp_path):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    with serving(tmp_path) as server:
        browser.get(server.address)
        wait(browser, "!document.getElementById('signal').hidden")
        browser.execute_script(
            "for (const id of ['reset', 'run']) document.getElementById(id).disabled = false"
        )
        unnamed = browser.execute_script(
            "return [...document.querySelectorAll('input,select,textarea,button,canvas')].filter("
            "e => !(e.labels && e.labels.length) && !e.textContent.trim()"
            " && !e.getAttribute('aria-label')).map(e => e.id)"
        )
        assert unnamed == []
        reached = set()
        for _ in range(14):
            ActionChains(browser).send_keys(Keys.TAB).perform()
            reached.add(browser.execute_script("return document.activeElement.id"))
        assert {"name", "token", "bearer", "open", "reset", "shape", "pace", "hand", "run"} <= (
            reached
        )
