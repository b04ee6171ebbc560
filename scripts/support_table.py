"""Writes the support table of the model families into the docs, from the registry and from what the tests run.

    python scripts/support_table.py            # rewrite the tables
    python scripts/support_table.py --check    # only say whether they are up to date (exit code 1: not)

What a family is comes from its file's docstring, what it refuses from its configuration rows, what was tested from the
lists that tests/parity and tests/families run.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megaswift.families import FAMILIES, Family, family_of  # noqa: E402
from megaswift.models.fields.rows import RequiredValue  # noqa: E402
from megaswift.models.options.linear import BLOCKS, BlockAxis  # noqa: E402
from megaswift.models.published.table import PUBLISHED  # noqa: E402
from megaswift.models.spec import ModelSpec  # noqa: E402
from megaswift.parallel.te_attention import te_unsupported_attention_features  # noqa: E402
from tests.parity import models, test_families  # noqa: E402

BEGIN = "<!-- support table: scripts/support_table.py writes this -->"
END = "<!-- end of support table -->"
TARGETS = {"docs/families.md": True, "converters/README.md": False}
"""Files, and whether they hold everything: what was tested, what is refused."""


def about(name: str) -> str:
    """The first paragraph of the family's docstring, as a table cell with its link."""
    paragraph = (importlib.import_module(f"megaswift.families.{name}").__doc__ or "").strip().split("\n\n")[0]
    text = " ".join(paragraph.split())
    words, _, link = text.rpartition(" https://")
    return f"[{words.rstrip('.')}](https://{link.rstrip('.')})" if words else text.rstrip(".")


def own_modules(spec: ModelSpec) -> list[str]:
    """What of a model is megaswift's own beside Transformer Engine's modules, and why."""
    own = [f"attention ({reason})" for reason in te_unsupported_attention_features(spec)]
    sinks = [
        f"attention with packed rows or CP ({r.partition(' with ')[0]})"
        for r in te_unsupported_attention_features(spec, packing=True)
    ]
    own += [text for text in sinks if "sinks" in text]
    if spec.features.qk_norm_width == "all":
        own.append("norms over all heads of queries and keys")
    latent = spec.transformer.get("multi_latent_attention")
    if spec.features.changes_rotated_queries and not latent:
        own.append("rotation of queries and keys")
    if spec.features.rope_local is None and latent:
        own.append("rotation of latent attention")
    return own


def published(family: Family) -> tuple[str, str]:
    """(published models whose config.json is read in the tests, what of them is not Transformer Engine's on a GPU)."""
    names = []
    own = "-"
    for name, (config, parameters) in PUBLISHED.items():
        if family_of(config).name == family.name:
            names.append(f"{name} ({parameters / 1e9:.3g} B)")
            own = ", ".join(own_modules(family.spec(config))) or own
    return ", ".join(names), own


def tested(family: Family) -> str:
    """Layouts that are held against Hugging Face for this family."""
    variants = [name for name, (kind, _) in models.VARIANTS.items() if kind == family.name]
    cases = [case for case in test_families.family_cases() if case.model == family.name]
    layouts = dict.fromkeys(" ".join(str(case).split()[1:]) for case in cases)
    return f"{', '.join(layouts)}; models {', '.join(variants)}" if variants else ", ".join(layouts)


def table(full: bool) -> list[str]:
    """One row a family."""
    titles = [
        "`model_type`",
        "what it is",
        "own modules on a GPU",
        *(["compared with Hugging Face on", "published models read"] if full else []),
    ]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for name in FAMILIES.names():
        models_read, own = published(FAMILIES.get(name))
        cells = [f"`{name}`", about(name), own, *([tested(FAMILIES.get(name)), models_read] if full else [])]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def refusals() -> list[str]:
    """What each family's configuration must not ask for, with the reason."""
    lines = [
        "",
        "Rejected configurations:",
        "",
        "| family | field of config.json | must be | because |",
        "|---|---|---|---|",
    ]
    for name in FAMILIES.names():
        for row in FAMILIES.get(name).config:
            if isinstance(row, RequiredValue):
                allowed = " or ".join(f"`{v!r}`" for v in row.allowed) or "absent"
                lines.append(f"| `{name}` | `{row.hf}` | {allowed} | {row.why} |")
    return lines


def axes() -> list[str]:
    """Block x axis: what passes on the native engine."""
    lines = [
        "",
        "On the native engine, axis by axis (a refusal ends the command before a model is built, with exit code 2):",
        "",
        f"| axis | {' | '.join(BLOCKS)} |",
        "|---" * (len(BLOCKS) + 1) + "|",
    ]
    for rows in zip(*BLOCKS.values(), strict=True):
        assert len({row.axis for row in rows}) == 1, "blocks have the same axes in the same order"
        lines.append(f"| {rows[0].axis} | {' | '.join(map(_answer, rows))} |")
    return lines


def _answer(row: BlockAxis) -> str:
    if row.refused:
        return f"refused (`--{row.option}`): {row.refused}"
    return f"passes, {row.condition}" if row.condition else "passes"


def main(argv: list[str] | None = None) -> int:
    """Writes or checks; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 when a table is out of date")
    check = parser.parse_args(argv).check
    stale = []
    for target, full in TARGETS.items():
        path = ROOT / target
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if BEGIN not in text or END not in text:
            print(f"{target}: no place for the table ({BEGIN})")
            stale.append(target)
            continue
        head, *rows = table(full)
        body = "\n".join([BEGIN, "", head, *rows, *([*refusals(), *axes()] if full else []), "", END])
        fresh = text[: text.index(BEGIN)] + body + text[text.index(END) + len(END) :]
        if fresh != text:
            stale.append(target)
            if not check:
                path.write_text(fresh, encoding="utf-8")
                print(f"{target}: written")
    if check and stale:
        print(f"out of date: {', '.join(stale)}; run python scripts/support_table.py")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
