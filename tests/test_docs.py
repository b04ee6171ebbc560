"""What the pages name is there: options, files and folders, the headings that links lead to."""

from __future__ import annotations

import importlib.util
import re
import textwrap
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

from megaswift import deploy, export, infer, sample
from megaswift import eval as evaluate
from megaswift.bridge.adapters.options.methods import VARIANTS
from megaswift.compat.names.answers import NAMES_ELSEWHERE
from megaswift.compat.names.translated import RENAMED, SWITCHES
from megaswift.config.sections import NAMES, TRAINING
from megaswift.data.formats import FORMATS, recognize_format
from megaswift.options.option import Option
from megaswift.options.values import FALSE, TRUE, InvalidValue, parse_option_value, resets_number_to_default
from tests.sources import FOLDERS, ROOT

PAGES = [ROOT / "README.md", ROOT / "README.zh-CN.md", ROOT / "converters/README.md"]
PAGES += sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / "docs/tutorials").glob("*.md")])
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}
OPTION = r"(?<![\w-])--([A-Za-z][\w-]*)"
OF_OTHERS = {
    "dist_ckpt_strictness",
    "load_format",
    "num_gpus",
    "no_local_rank",
    "admin_api_key",
    "rdzv_endpoint",
    "disable_cuda_graph",
    "disable_overlap_schedule",
    "grammar_backend",
    "lora_backend",
    "build_arg",
    "ipc",
    "rm",
    "ulimit",
    "exclusive",
    "time",
    "requeue",
    "retry",
    "retry_connrefused",
    "retry_delay",
    "silent",
    "datasets",
    "dataset_args",
    "eval_type",
    "signal",
}
"""Options of Megatron-LM, vLLM, torchrun, DeepSpeed's launcher, SGLang, docker, Slurm, curl, timeout and
EvalScope that no file of ours says."""
PLACEHOLDER = r"[A-Z][A-Z_]*|\.\.\.|.*[<>*(){}\[\]].*"
"""A value for the reader to fill in."""
VALUES_OF_OTHERS = {"torch_native", "tp2"}
"""Of options of SGLang and of `megaswift bisect` that have names of training's."""


def known_options() -> set[str]:
    """Of training and inference by every spelling; of scripts, of converters and of other programs as our code writes
    them."""
    tables = {
        *NAMES,
        *(name for module in (infer, deploy, export, evaluate, sample) for name in module.COMMAND.table.names),
    }
    files = [
        p
        for folder in ("megaswift", "scripts", "converters")
        for p in (ROOT / folder).rglob("*")
        if p.suffix in (".py", ".sh")
    ]
    return (
        tables
        | OF_OTHERS
        | {o.replace("-", "_") for p in files for o in re.findall(OPTION, p.read_text(encoding="utf-8"))}
    )


@cache
def headings(page: Path) -> set[str]:
    """What a link may have behind its #."""
    found = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def test_options() -> None:
    known = known_options()
    named = {(page, option) for page, text in TEXTS.items() for option in re.findall(OPTION, text)}
    named -= {(page, o) for page, o in named if "migrating" in page and o in {*NAMES_ELSEWHERE, *RENAMED, *SWITCHES}}
    assert len(named) > 300 and [(page, o) for page, o in sorted(named) if o.replace("-", "_") not in known] == []


def values(text: str) -> Iterator[tuple[str, list[str]]]:
    """Options with the words that follow them, in code: `--engine ddp`, and in blocks of commands, not of messages."""
    text = re.sub(r"^```text\n.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    code = [*re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)]
    code += re.findall(r"(?<!`)`([^`]+)`(?!`)", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
    for block in code:
        for line in block.replace("\\\n", " ").splitlines():
            for name, words in re.findall(rf"{OPTION}((?:[ =](?!--)[^\s#|&;]+)*)", line):
                yield name, re.split(r"[ =]", words.strip(" ="))


def fits(name: str, words: list[str]) -> bool:
    """Whether an option of some command takes these words, as far as they are no names for the reader to fill in."""
    tables = [TRAINING, *(module.COMMAND.table for module in (infer, deploy, export, evaluate, sample))]
    known = [t.options[t.names[name]] for t in tables if name in t.names]
    words = [word.strip("\"'\\,.:") for word in words]
    free = not words[0] or any(re.fullmatch(PLACEHOLDER, word) for word in words) or words[0] in VALUES_OF_OTHERS
    return not known or free or any(takes(option, words) for option in known)


def takes(option: Option, words: list[str]) -> bool:
    """Whether the words, or the first of them, are a value of the option. A switch may stand before other text."""
    if (
        option.kind == "map"
        or resets_number_to_default(option, words[0])
        or words[0] in VARIANTS
        or (option.kind == "bool" and words[0] not in TRUE + FALSE)
    ):
        return True
    try:
        parse_option_value(option, words if option.kind in ("list", "numbers") and option.choices else words[0])
    except InvalidValue:
        return False
    return True


def test_values_of_options() -> None:
    named = [(page, name.replace("-", "_"), words) for page, text in TEXTS.items() for name, words in values(text)]
    assert sum(bool(words[0]) for _, _, words in named) > 400
    assert [(page, name, words) for page, name, words in named if not fits(name, words)] == []
    assert not fits("engine", ["torch"]) and fits("engine", ["ddp"]) and not fits("lr", ["fast"])


def test_links() -> None:
    links = [
        (page, *link.partition("#"))
        for page, text in TEXTS.items()
        for link in re.findall(r"\]\(((?!https?://)[^)]+)\)", text)
    ]
    targets = [
        (page, (ROOT / page).parent / file if file else ROOT / page, heading) for page, file, _, heading in links
    ]
    assert len(targets) > 50 and [(page, str(t)) for page, t, _ in targets if not t.exists()] == []
    assert [(page, t.name, heading) for page, t, heading in targets if heading and heading not in headings(t)] == []


def test_files() -> None:
    """Those that are named from the repository's root, or from the package's."""
    inner = [p.name for p in (ROOT / "megaswift").iterdir() if p.is_dir()]
    roots = [(ROOT, [*FOLDERS, "configs", "docs", "docker"]), (ROOT / "megaswift", inner)]
    named = [
        (page, root, name)
        for root, folders in roots
        for page, text in TEXTS.items()
        for name in re.findall(rf"`((?:{'|'.join(folders)})/[\w./*-]+)", text)
        if not re.fullmatch(r"rewards/[\w/]+", name)  # a metric
    ]
    assert len(named) > 100 and [(page, name) for page, root, name in named if not list(root.glob(name))] == []


def unknown_files(text: str, paths: set[str]) -> list[str]:
    """Python files in backticks, under a folder or by their name alone, that no path ends with. A name with a part to
    fill in (`<name>.py`, `FILE.py`) is not looked for."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    named = [name for code in re.findall(r"`([^`]+)`", prose) for name in re.findall(r"[^\s:]+\.py\b", code)]
    return [
        name
        for name in named
        if not re.search(r"[<>]|[A-Z]{2}", name) and not any(fnmatch(path, f"*/{name}") for path in paths)
    ]


FILES_OF_OTHERS = {
    "examples/scripts/*.py",
    "my_rewards.py",
    "plugin.py",
    "preprocess_data.py",
    "pretrain_*.py",
    "swift/cli/*.py",
    "trl/scripts/*.py",
}
"""Python files of other toolkits, and of the reader's own."""


def test_python_files_exist() -> None:
    """Those that a page names in any way: `layers/spec.py` and `spec.py` too."""
    paths = {f"/{file.relative_to(ROOT)}" for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")}
    paths |= {f"/{file.name}" for file in ROOT.glob("*.py")}
    texts = TEXTS | {"CONTRIBUTING.md": (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")}
    found = {(page, name) for page, text in texts.items() for name in unknown_files(text, paths)}
    assert sorted(pair for pair in found if pair[1] not in FILES_OF_OTHERS) == []
    assert unknown_files("`gone.py`, `a/b.py --x`, `<name>.py`, `c/*_b.py`", {"/z/a/b.py"}) == ["gone.py", "c/*_b.py"]


def examples(page: str, language: str) -> list[str]:
    """The blocks of a language on a page, without the indentation that a list gives them."""
    blocks = re.findall(r"^( *)```(\w*)\n(.*?)^ *```", TEXTS[page], re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(block) for _, written, block in blocks if written == language]


def test_the_source_tree_has_a_line_for_every_folder() -> None:
    tree = next(block for block in examples("docs/architecture.md", "text") if block.startswith("megaswift/"))
    packages = [file.parent.name for file in (ROOT / "megaswift").glob("*/__init__.py")]
    named = [name for line in tree.splitlines() for name in re.findall(r"(\w+)/(?=\s)", line[:20])][1:]
    assert sorted(named) == sorted([*packages, *FOLDERS[1:], "configs", "docs", "docker"])


def test_the_page_s_new_family_is_one() -> None:
    blocks = [block for block in examples("docs/families.md", "python") if "FAMILIES.register" in block]
    file = (ROOT / "megaswift/families/mistral.py").read_text(encoding="utf-8")
    assert len(blocks) == 1 and file.endswith(blocks[0])


def test_the_page_s_new_format_works_as_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"prompt": "How much is 1 + 1?", "completion": "2"}
    assert "prompt_completion" not in FORMATS.names()
    monkeypatch.setattr(FORMATS, "_items", dict(FORMATS._items))
    file = tmp_path / "prompt_completion.py"
    file.write_text(next(block for block in examples("docs/data.md", "python") if "FORMATS" in block), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("prompt_completion", file)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    sample = recognize_format(row, "sft").parse(row)
    assert [(m["role"], m["content"]) for m in sample.messages] == [
        ("user", row["prompt"]),
        ("assistant", row["completion"]),
    ]
