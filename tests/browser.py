"""Pages as a browser shows them: Chromium without a screen prints the document after its scripts ran."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium in PATH: bash scripts/setup_slow_tier.sh")
ANSWER = re.compile(r'<pre id="answer">(.*?)</pre>', re.DOTALL)


def document(page: Path, width: int = 1280) -> str:
    """The document of a page after its scripts ran, as markup."""
    assert CHROMIUM is not None
    words = [CHROMIUM, *FLAGS, f"--user-data-dir={page.parent / 'profile'}", f"--window-size={width},900", "--dump-dom"]
    done = subprocess.run([*words, page.as_uri()], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def picture(page: Path, file: Path, width: int, height: int, script: str = "") -> None:
    """Draws the top of a page, at which `script` has been."""
    assert CHROMIUM is not None
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text(encoding="utf-8"))
    copy = page.with_name(f"drawn-{page.name}")
    copy.write_text(text.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    words = [CHROMIUM, *FLAGS, f"--user-data-dir={page.parent / 'profile'}", "--hide-scrollbars"]
    words += [f"--window-size={width},{height}", f"--screenshot={file}", copy.as_uri()]
    subprocess.run(words, capture_output=True, timeout=60, check=True)


def evaluated(page: Path, script: str, width: int = 1280) -> Any:
    """What `script`, the body of a function, returns in a copy of the page without its content policy."""
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text(encoding="utf-8"))
    driver = (
        "<script>const made = document.createElement('pre'); made.id = 'answer';"
        f"made.textContent = JSON.stringify((() => {{{script}}})()); document.body.append(made);</script></body>"
    )
    copy = page.with_name(f"driven-{page.name}")
    copy.write_text(text.replace("</body>", driver), encoding="utf-8")
    found = ANSWER.search(document(copy, width))
    assert found is not None, "the script of the test failed"
    return json.loads(unescape(found[1]))
