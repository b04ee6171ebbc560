"""The documentation site builds without a warning, in both languages, and loads nothing from other hosts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megaswift import deploy
from megaswift.config.sections import OPTIONS
from tests.sources import ROOT

pytestmark = pytest.mark.process
LOADED = re.compile(r"""<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=["'](https?:)?//""")
"""A tag for which a browser sends a request to another host."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built pages."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    variables = {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_there_in_both_languages(site: Path) -> None:
    """Those without a translation in English."""
    names = {page.relative_to(ROOT / "docs").with_suffix("") for page in (ROOT / "docs").rglob("*.md")}
    names = {name for name in names if not name.name.endswith(".zh-CN")}
    assert len(names) > 20
    for name in names:
        folder = name.parent if name.name == "index" else name
        for language in ("", "zh-CN"):
            assert (site / language / folder / "index.html").is_file(), (language, name)
    assert "快速开始" in (site / "zh-CN/index.html").read_text(encoding="utf-8")


def test_links_lead_to_chinese_headings(site: Path) -> None:
    """An anchor is the heading's own text, as on GitHub."""
    page = (site / "zh-CN/troubleshooting/index.html").read_text(encoding="utf-8")
    assert 'id="启动缓慢"' in page
    assert 'id="settings-that-fit---fit-true"' in (site / "memory/index.html").read_text(encoding="utf-8")


def test_the_reference_has_every_option(site: Path) -> None:
    page = (site / "reference/options/index.html").read_text(encoding="utf-8")
    assert [name for name in OPTIONS if f"<code>--{name}</code>" not in page] == []
    page = (site / "reference/inference_options/index.html").read_text(encoding="utf-8")
    assert [name for name in deploy.COMMAND.table.options if f"<code>--{name}</code>" not in page] == []
    assert "<!-- training options -->" not in page


def test_names_of_options_stay_on_one_line(site: Path) -> None:
    page = (site / "rl_losses/index.html").read_text(encoding="utf-8")
    assert '<span class="option"><code>--delta</code></span>' in page
    assert '<code><span class="option">--loss_type</span> rloo</code>' in page
    assert '<pre><span class="option">' not in page and "nowrap" in (site / "stylesheets/extra.css").read_text()


def test_the_reference_has_the_python_names(site: Path) -> None:
    page = (site / "reference/python/index.html").read_text(encoding="utf-8")
    for name in ("megaswift.api.Trainer.train", "megaswift.plugins.reward", "megaswift.errors.ConfigError"):
        assert f'id="{name}"' in page, name


def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 50
    assert [page.name for page in pages if LOADED.search(page.read_text(encoding="utf-8"))] == []
    assert LOADED.search('<script async src="https://example.org/a.js">')


def test_links_out_of_the_docs_are_paths(site: Path) -> None:
    """The site has no address of a repository, and a file of it is no page."""
    page = (site / "fallback/index.html").read_text(encoding="utf-8")
    assert "<code>configs/fsdp/fsdp2.json</code>" in page and 'href="../configs' not in page
