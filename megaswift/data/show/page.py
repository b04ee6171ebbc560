"""`megaswift data show --html FILE`: the report as one page that needs nothing else, with search and paging of samples.

Texts of rows are escaped. The page's policy allows one script, that of this file, by its hash, and loads nothing.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterator, Sequence

from megaswift.data.show.report import Block, Histogram, Sample, TokenizedText

STYLE = """
:root { color-scheme: light dark; --loss: #0a7d2c; --back: #d8f3df; --dim: #666; --bar: #4a7bd0; --line: #ccc;
  --page: #fff }
@media (prefers-color-scheme: dark) {
  :root { --loss: #7ee29a; --back: #123d20; --dim: #999; --bar: #6f9be8; --line: #444; --page: #16181b } }
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70em; margin: 1.5em auto; padding: 0 1em;
  background: var(--page) }
h1 { font-size: 1.4em; overflow-wrap: anywhere } h2 { font-size: 1em; margin: 1.4em 0 .4em }
.tokens { font: 13px/1.7 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere;
  border: 1px solid var(--line); border-radius: 6px; padding: .7em 1em; color: var(--dim) }
.tokens span { border-right: 1px dotted var(--line) }
.tokens .loss { color: var(--loss); background: var(--back); font-weight: 600 }
.tokens [data-n]::after { content: attr(data-n); font-size: .7em; vertical-align: sub; font-weight: 400; opacity: .75 }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .3em 0 }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin-bottom: 1.2em; width: 100%;
  max-width: 45em }
td { padding: 0 .6em; text-align: right; white-space: nowrap } td.bar { width: 100%; text-align: left }
td.bar div { background: var(--bar); height: .9em; border-radius: 2px }
.key { color: var(--dim) } .key .tokens { padding: .1em .4em }
.controls { position: sticky; top: 0; display: flex; flex-wrap: wrap; gap: .5em; align-items: center; padding: .6em 0;
  background: var(--page); border-bottom: 1px solid var(--line) }
.controls[hidden] { display: none }
.controls input { flex: 1 1 12em; min-width: 0 } .controls :is(input, button) { font: inherit; padding: .25em .6em }
"""
SCRIPT = """
const samples = [...document.querySelectorAll("section")];
const plain = text => text.toLowerCase().replace(/\\s+/g, " ").trim();
const texts = samples.map(sample => plain(sample.textContent.replaceAll("\\u23ce", " ")));
const controls = document.querySelector(".controls");
const [input, before, after, where] = controls.children;
const size = 20;
let found = samples, page = 0;
function show() {
  const pages = Math.max(1, Math.ceil(found.length / size));
  page = Math.min(Math.max(page, 0), pages - 1);
  const shown = new Set(found.slice(page * size, (page + 1) * size));
  for (const sample of samples) sample.hidden = !shown.has(sample);
  before.disabled = page === 0;
  after.disabled = page === pages - 1;
  where.textContent = `${found.length} of ${samples.length} samples, page ${page + 1} of ${pages}`;
}
function turn(step) {
  page += step;
  show();
  controls.scrollIntoView();
}
input.addEventListener("input", () => {
  const wanted = plain(input.value);
  found = samples.filter((_, i) => texts[i].includes(wanted));
  page = 0;
  show();
});
before.addEventListener("click", () => turn(-1));
after.addEventListener("click", () => turn(1));
controls.hidden = false;
show();
"""
"""Shows the samples that contain the text in the field, 20 to a page. Without scripts the page shows all of them."""
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src "
    f"'sha256-{base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()}'"
)
CONTROLS = (
    '<div class="controls" hidden><input type="search" placeholder="Search in samples" aria-label="Search in samples">'
    '<button type="button">Previous</button><button type="button">Next</button><span role="status"></span></div>'
)


def report_page(blocks: Sequence[Block], title: str) -> str:
    """Return the page with all parts of a report: numbers first, then samples."""
    samples = [block for block in blocks if isinstance(block, Sample)]
    numbers = [part for block in blocks if not isinstance(block, Sample) for part in _markup(block)]
    shown = [f"<section>{''.join(_sample(sample))}</section>" for sample in samples]
    body = "\n".join([*numbers, *([CONTROLS] if samples else []), *shown])
    script = f"<script>{SCRIPT}</script>\n" if samples else ""
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{html.escape(title)}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(POLICY, quote=False)}">\n'
        f'<meta name="viewport" content="width=device-width">\n<style>{STYLE}</style>\n</head>\n<body>\n'
        f"<h1>{html.escape(title)}</h1>\n"
        '<p class="key"><span class="tokens"><span class="loss">Green</span></span> tokens carry loss; a number before '
        'them is their weight. <span class="tokens"><span data-n="2">你</span></span> is a character that is split '
        "over two tokens.</p>\n"
        f"{body}\n{script}</body>\n</html>\n"
    )


def _sample(sample: Sample) -> Iterator[str]:
    """A sample's markup; its first line is the heading."""
    for number, part in enumerate(sample.parts):
        if isinstance(part, TokenizedText):
            yield f"<h2>{html.escape(part.title.strip('- '))}</h2>\n"
            yield f'<div class="tokens">{"".join(_tokens(part))}</div>\n'
        elif part.strip():
            shown = html.escape(part.strip("- " if not number else "\n"))
            yield f"<pre>{shown}</pre>\n" if number else f"<h2>{shown}</h2>\n"


def _markup(block: str | Histogram) -> Iterator[str]:
    if isinstance(block, str):
        if block.strip():
            yield f"<pre>{html.escape(block.strip(chr(10)))}</pre>"
    else:
        yield from _table(block)


def _tokens(block: TokenizedText) -> Iterator[str]:
    before = 1.0
    for token in block.tokens:
        shown = html.escape(token.text).replace("⏎", "⏎\n")
        if token.weight not in (0, 1) and token.weight != before:
            yield f"<small>{token.weight:g} x </small>"
        loss = ' class="loss"' if token.weight else ""
        several = f' data-n="{token.tokens}"' if token.tokens > 1 else ""
        yield f"<span{loss}{several}>{shown}</span>"
        before = token.weight


def _table(block: Histogram) -> Iterator[str]:
    largest = max(count for _, _, count in block.bars)
    yield f"<h2>{html.escape(block.title)}</h2>\n<table>"
    for first, last, count in block.bars:
        bar = f'<div style="width: {100 * count / largest:.1f}%"></div>'
        yield f'<tr><td>{first:,} - {last:,}</td><td class="bar">{bar}</td><td>{count:,}</td></tr>'
    yield "</table>"
