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
        at = browser.execute_script("return step")
        assert browser.find_element(By.ID, "at").text == f"Step {at}"
        assert browser.find_element(By.ID, "status").text == "Stream mine is open."
        assert painted(browser, "state") > 10 and painted(browser, "answer") > 3
        wait(browser, "/^[0-9.]+ ms/.test(document.getElementById('latency-now').textContent)")
        wait(browser, "document.getElementById('size-now').textContent.includes('of 1')")
        assert painted(browser, "latency") > 1
        assert browser.find_element(By.ID, "legend").text.startswith("input 1 of 5")
        browser.save_screenshot(str(tmp_path.parent / "signal.png"))
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


LETTERS = "\nabcde "


@pytest.fixture
def letters(tmp_path, rng):
    """A character model, and its file."""
    size = len(LETTERS) + 1
    chain = Chain(Embedding(size, 6, rng=rng), LSTM(6, 24, rng=rng), Dense(24, size, rng=rng))
    file = tmp_path / "letters.safetensors"
    recur.save(chain, file, metadata={"alphabet": json.dumps(list(LETTERS))})
    return chain, file


def test_a_character_model_reads_what_is_typed_and_writes_on(browser, tmp_path, letters):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    chain, file = letters
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
            logits = stream(LETTERS.index(c) + 1)
        best = LETTERS[int(np.argmax(logits[1:]))]
        assert shown.startswith(json.dumps(best))
        browser.find_element(By.ID, "write").send_keys(Keys.ENTER)
        wait(browser, "step >= 15")
        browser.find_element(By.ID, "write").send_keys(Keys.ENTER)
        wait(browser, "!writing")
        assert len(browser.find_element(By.ID, "output").text) >= 12
        browser.save_screenshot(str(tmp_path.parent / "text.png"))
        # What is pasted is read too; a reset begins anew, also while the model writes.
        browser.execute_script(
            "const t = document.getElementById('typed'); t.focus();"
            "document.execCommand('insertText', false, 'badxe')"
        )
        wait(
            browser,
            "sent.size === 0 && document.getElementById('output').innerText.endsWith('badxe')",
        )
        assert browser.find_element(By.ID, "hint").text == 'The model does not know "x"'
        browser.find_element(By.ID, "write").send_keys(Keys.ENTER)
        wait(browser, "writing && sent.size")
        browser.find_element(By.ID, "reset").send_keys(Keys.ENTER)
        wait(browser, "!resetting && step >= 4")
        assert browser.find_element(By.ID, "error").text == ""
        browser.find_element(By.ID, "write").send_keys(Keys.ENTER)
        assert complaints(browser, server) == []


def test_the_page_goes_on_by_itself_when_the_server_dies_and_returns(browser, tmp_path, letters):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    chain, file = letters
    with serving(tmp_path, file=file) as server:
        browser.get(server.address)
        wait(browser, "!document.getElementById('text').hidden")
        browser.find_element(By.ID, "open").send_keys(Keys.ENTER)
        wait(browser, "step === 1")
        assert browser.execute_script("return document.activeElement.id") == "typed"
        browser.find_element(By.ID, "write").send_keys(Keys.ENTER)
        wait(browser, "step >= 10")
        server.kill()
        wait(browser, "document.getElementById('status').textContent.includes('Trying again')")
        at = browser.execute_script("return step")
        server.start()
        wait(browser, f"step >= {at + 10}")
        assert browser.find_element(By.ID, "status").text.endswith("is back.")
        browser.find_element(By.ID, "write").send_keys(Keys.ENTER)
        wait(browser, "!writing && sent.size === 0")
        # Every character that it wrote was read once: the state is that of one process.
        stream = recur.Stream(chain)
        for c in "\n" + browser.execute_script(
            "return document.getElementById('output').textContent"
        ):
            logits = stream(LETTERS.index(c) + 1)
        assert stream.steps == browser.execute_script("return step")
        assert np.allclose(browser.execute_script("return logits"), logits)


def test_a_stream_that_the_server_forgot_is_said_and_opened_anew(browser, tmp_path):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    with serving(tmp_path, store="memory") as server:
        browser.get(server.address)
        wait(browser, "!document.getElementById('signal').hidden")
        browser.find_element(By.ID, "name").send_keys("mine", Keys.ENTER)
        wait(browser, "held")
        server.kill()
        server.start()
        wait(browser, "document.getElementById('error').textContent.includes('no stream')")
        assert browser.find_element(By.ID, "status").text == "No stream is open."
        assert not browser.find_element(By.ID, "run").is_enabled()
        browser.find_element(By.ID, "open").send_keys(Keys.ENTER)
        wait(browser, "held && held.id === 'mine'")
        assert browser.find_element(By.ID, "error").text == ""


def test_the_bearer_token_is_asked_for_where_the_server_wants_one(browser, tmp_path):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    with serving(tmp_path, "--bearer", "secret") as server:
        browser.get(server.address)
        wait(browser, "!document.getElementById('guard').hidden")
        browser.find_element(By.ID, "bearer").send_keys("secret", Keys.TAB)
        wait(browser, "!document.getElementById('signal').hidden")
        browser.find_element(By.ID, "open").send_keys(Keys.ENTER)
        wait(browser, "held")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_and_lines_stand_out_and_nothing_is_wider_than_a_telephone(browser, tmp_path, dark):
    def channel(c):
        c /= 255
        return c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4

    def luminance(colour):
        return np.dot([0.2126, 0.7152, 0.0722], [channel(int(c)) for c in colour])

    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    size = {"width": 340, "height": 800, "deviceScaleFactor": 2, "mobile": True}
    with serving(tmp_path) as server:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        try:
            browser.get(server.address)
            wait(browser, "!document.getElementById('signal').hidden")
            assert browser.execute_script("return document.documentElement.scrollWidth") <= 340
            found = browser.execute_script(
                "const e = document.createElement('i'); document.body.append(e);"
                "return Object.fromEntries(arguments[0].map(n => {"
                " e.style.color = `var(--${n})`;"
                " return [n, getComputedStyle(e).color.match(/[0-9]+/g).slice(0, 3)]}))",
                ["paper", "text", "line", "grey", "one", "two", "three", "four"],
            )
        finally:
            browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    paper = luminance(found.pop("paper"))
    assert (paper < 0.05) == dark
    for name, colour in found.items():
        light, deep = sorted([luminance(colour), paper], reverse=True)
        contrast = (light + 0.05) / (deep + 0.05)
        assert contrast >= (3 if name == "line" else 4.5), (name, contrast)


def test_every_control_has_a_name_and_is_reached_by_tab(browser, tmp_path):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    with serving(tmp_path) as server:
        browser.get(server.address)
        wait(browser, "!document.getElementById('signal').hidden")
        browser.execute_script(
            "for (const id of ['reset', 'run']) document.getElementById(id).disabled = false;"
            "document.getElementById('guard').hidden = false"
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
