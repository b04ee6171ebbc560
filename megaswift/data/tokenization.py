"""Tokenizes `--dataset` into token stores, once per job, in parallel, cached by content hash.

Owns the cache key (file contents, tokenizer, template, options, our code) and running the workers. What the key leaves
out on purpose: max_length, truncation, packing and order, which are views over the store
(`store/documents.py`, `batches/packing.py`, `batches/epoch_order.py`)."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from megaswift import log
from megaswift.data.encode.rows import SHOWN, EncodeSpec, encode_spec
from megaswift.data.groups.rows import GroupTexts
from megaswift.data.preference.encode import row_encoder_for_task
from megaswift.data.prompts.rows import ANSWER
from megaswift.data.row_counters import note_text
from megaswift.data.show.loss_mask import (
    COUNTED_AS,
    FAULTS,
    FIRST_IMAGE_ROWS,
    FIRST_ROWS,
    Findings,
    certify_first_rows,
)
from megaswift.data.sources import columns, hub
from megaswift.data.sources.csv_encoding import UTF_8, encoding_of
from megaswift.data.sources.files import (
    DatasetFiles,
    FilePart,
    cached_dataset_folder,
    resolve_dataset_files,
    split_into_parts,
)
from megaswift.data.sources.remote import with_local_copy
from megaswift.data.store.cached import read_cached_dataset
from megaswift.data.store.shared_build import (
    build_once,
    content_hash_of_input_files,
    data_cache_folder,
    is_cache_builder_process,
    remove_at_exit,
    wait_for_build,
    wait_for_content_hash,
)
from megaswift.data.store.token_store import PieceReport, TokenStore, merge_pieces, read_piece_report, write_piece
from megaswift.data.vision.processor import tokenizer_of_tokenizer_or_processor
from megaswift.errors import DataError, Problem, merge_similar_problems
from megaswift.launchers.options.variables import launch_identity
from megaswift.options.tasks import CLASSIFIERS, RL

WORKER_BYTES = 2 << 20
"""Input that is worth the start of another process (about a second)."""
IMAGE_WORKER_BYTES = 1 << 16
"""The same where each row brings images, which take far longer than its text."""
ENTRY = "tokenize_worker.py"
"""The module that tokenizes; with all that it imports, the code that decides which tokens a row becomes."""
REGISTRIES = ("formats",)
"""Packages below `megaswift.data` whose modules are found by their names."""
_IMPORT = re.compile(
    r"^[ \t]*(?:from|import)[ \t]+(megaswift[\w.]*)(?:[ \t]+import[ \t]+(\([^)]*\)|[^\n]*))?", re.MULTILINE
)


def tokenization_code_files() -> list[Path]:
    """The files of `megaswift.data` that `ENTRY` imports, directly or not, within functions too; itself included. An
    imported package (`formats`, whose modules register themselves) counts with all its files."""
    folder = Path(__file__).parent
    reached: set[Path] = set()
    names: set[str] = set()
    pending = [folder / ENTRY]
    while pending:
        file = pending.pop()
        if file not in reached:
            reached.add(file)
            new = {*_imported(file)} - names
            names |= new
            pending += [path for name in new for path in _files_of(folder, name)]
    return sorted(reached)


def _imported(file: Path) -> Iterator[str]:
    """Dotted names below `megaswift.data` that a file imports; of `from package import name` both readings. A text that
    looks like an import counts too: parsing all files takes ten to twenty times as long."""
    for package, names in _IMPORT.findall(file.read_text(encoding="utf-8")):
        found = [package, *(f"{package}.{name}" for name in re.findall(r"\w+", names))]
        yield from (name.removeprefix("megaswift.data.") for name in found if name.startswith("megaswift.data."))


def _files_of(folder: Path, name: str) -> list[Path]:
    """The file of a module and those of the packages around it; of a package whose modules register themselves, all
    files; none where the name is not a module."""
    parts = name.split(".")
    path = folder.joinpath(*parts)
    if path.is_dir():
        return sorted(path.glob("*.py")) if name in REGISTRIES else [path / "__init__.py"]
    file = path.with_suffix(".py")
    if not file.is_file():
        return []
    return [file, *(folder.joinpath(*parts[:depth], "__init__.py") for depth in range(1, len(parts)))]


@cache
def tokenization_code_hash() -> str:
    """Hash of the code that decides which tokens a row becomes."""
    digest = hashlib.sha256()
    for file in tokenization_code_files():
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _file_hash(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "blake2b").hexdigest()


def _dated(spec: EncodeSpec) -> bool:
    """Whether the template writes today's date into the text."""
    return spec.templates is not None and any("strftime_now" in t for t in spec.templates.named.values())


def _spec_key(spec: EncodeSpec) -> str:
    today = time.strftime("%Y-%m-%d") if _dated(spec) else ""
    import tokenizers
    import transformers

    return _digest(asdict(spec), tokenization_code_hash(), today, tokenizers.__version__, transformers.__version__)


def tokenize_datasets(
    data: Any,
    tokenizer: Any,
    task: str = "sft",
    val: bool = False,
    seed: int | None = None,
    groups: GroupTexts | None = None,
) -> list[tuple[DatasetFiles, TokenStore]]:
    """The tokenized data sets of `--dataset` (or `--val_dataset`), built by local rank 0 while the others wait.

    `seed` draws the rows of `path#500` (not of `--val_dataset`); without one they are the first.
    Raises DataError for anything that cannot be read, before any model exists.
    """
    spec = encode_spec(data, tokenizer, task, groups)
    names = data.val_dataset if val else data.dataset
    if not names:
        raise DataError(Problem("--dataset", "is missing", "--dataset data.jsonl"))
    stores = []
    if not val:
        check_renamed_columns_exist(data, task)
    for place, name in enumerate(names):
        drawn_by = None if seed is None or val or not data.shuffle else (seed, place)
        for source, store in _entry(name, "--val_dataset" if val else "--dataset", drawn_by, (spec, data, tokenizer)):
            if store.manifest["bad"]:
                log.warn(f"{source.name}: {store.skipped} (--strict false)")
            for note, count in store.manifest["notes"].items():
                log.warn(f"{source.name}: {count:,} rows {note_text(note)}")
            warn_of_mask_faults(source.name, store.manifest)
            if is_cache_builder_process():
                store.check_images()
            stores.append((replace(source, entry=place), store))
    return stores


def _entry(
    name: str, flag: str, drawn_by: tuple[int, int] | None, how: tuple[EncodeSpec, Any, Any]
) -> list[tuple[DatasetFiles, TokenStore]]:
    """The token stores of one entry of the option `flag`: those of a cached data set, or of its files."""
    spec, data, reader = how
    tokenizer_name = str(tokenizer_of_tokenizer_or_processor(reader).name_or_path)
    root = data_cache_folder(data.dataset_cache_dir)
    cached = read_cached_dataset(with_local_copy(name, root, flag), spec, tokenizer_name, flag)
    if cached is not None:
        return cached
    source = replace(resolve_or_download_dataset_files(name, root, flag), sample_by=data.sample_by)
    if drawn_by is not None and source.rows is not None and not source.first:
        source = replace(source, draw=drawn_by)
    return [(source, TokenStore(_store(root, source, spec, data)))]


def warn_of_mask_faults(name: str, manifest: Mapping[str, Any]) -> None:
    """Warnings of what does not hold of the loss masks of a data set's first rows."""
    noted = [COUNTED_AS[note] for note in manifest["notes"] if note in COUNTED_AS]
    for kind, (count, rows, *examples) in manifest.get("mask_faults", {}).items():
        if kind not in noted:
            log.warn(
                f"{name}: in {count} of the first {rows} rows {FAULTS[kind]} ({examples[0]}); megaswift data show "
                "checks all rows"
            )


def check_renamed_columns_exist(data: Any, task: str) -> None:
    """DataError for columns of --columns that no row of the run's data sets has. `response` may be made
    (questions.py)."""
    renamed = {old: new for old, new in data.columns.items() if old != ANSWER or task not in RL}
    if renamed:
        root = data_cache_folder(data.dataset_cache_dir)
        named = [("--dataset", name) for name in data.dataset] + [("--val_dataset", name) for name in data.val_dataset]
        files = [
            resolve_or_download_dataset_files(n, root, f)
            for f, n in named
            if not cached_dataset_folder(with_local_copy(n, root, f))
        ]
        columns.check_columns_exist(files, renamed if files else {})


def resolve_or_download_dataset_files(name: str, root: Path, flag: str = "--dataset") -> DatasetFiles:
    """The files behind an entry of the option `flag`, fetched from a hub where it is an id, and copied where it is an
    address."""
    fetch = partial(hub.download_dataset_as_parquet, root, flag)
    source = replace(resolve_dataset_files(with_local_copy(name, root, flag), fetch, flag), name=name)
    for file in source.files:
        if log.is_main() and source.kind(file) == "csv" and encoding_of(file) != UTF_8:
            _note_other_encoding(file)
    return source


@cache
def _note_other_encoding(file: Path) -> None:
    log.info(f"{file}: is not UTF-8, and is read as GB18030, in which Excel saves CSV files in China")


def _store(root: Path, source: DatasetFiles, spec: EncodeSpec, data: Any) -> Path:
    stats = [(str(f.absolute()), f.stat().st_size, f.stat().st_mtime_ns) for f in source.files]
    options: tuple[Any, ...] = (_spec_key(spec), source.rows, source.draw, source.sample_by)
    if not data.use_dataset_cache:
        options = (*options, launch_identity())
    alias = _digest("alias", stats, options)
    if not is_cache_builder_process():
        target = root / wait_for_content_hash(root, alias)
        wait_for_build(target)
        return target

    def content() -> str:
        return _digest([(str(f), _file_hash(f)) for f in source.files], options)

    target = root / content_hash_of_input_files(root, alias, content)
    build_once(target, lambda scratch: _build(scratch, target, source, (spec, data.dataset_num_proc)))
    if not data.use_dataset_cache:
        remove_at_exit(target, root / f"{alias}.alias")
    return target


def _malformed(reports: list[PieceReport]) -> DataError:
    """Return the error that ends a strict build: the malformed rows of the first piece that has any."""
    first = next(i for i, r in enumerate(reports) if r.bad)
    read = reports[: first + 1]
    bad = reports[first].bad
    problems = merge_similar_problems(reports[first].problems[:SHOWN])
    if bad > SHOWN:
        problems.append(Problem(f"and {bad - SHOWN} more rows", "are malformed too"))
    fix = "correct the row, or give --strict false to skip such rows and count them"
    proposed = next((p.fix for p in problems if p.fix), "")
    if (bad > 1 or proposed) and not any(r.rows or r.causes for r in read):
        other = (
            "use other data, another task, another template (--chat_template FILE), or --columns FROM=TO "
            "where columns have other names"
        )
        fix = f"no valid row so far: {proposed or other}"
    return DataError([*(replace(p, fix="") for p in problems[:-1]), replace(problems[-1], fix=fix)])


def _build(scratch: Path, target: Path, source: DatasetFiles, how: tuple[EncodeSpec, int]) -> None:
    spec, processes = how
    began = time.monotonic()
    parts = split_into_parts(source, processes)
    worth = WORKER_BYTES if spec.processor is None else IMAGE_WORKER_BYTES
    count = min(processes, len(parts), 1 + sum(f.stat().st_size for f in source.files) // worth)
    certified = None
    in_files = all(path for path, _ in spec.plugins)  # formats of a script are in this process alone
    if count > 1 and in_files:
        certified = _run_workers(scratch, spec, parts, count)
    else:
        encoder = row_encoder_for_task(spec)
        for i, part in enumerate(parts):
            piece = encoder.encode_part(part)
            write_piece(scratch, i, piece)
            if spec.strict and piece.bad:
                break
    reports = [r for r in (read_piece_report(scratch, i) for i in range(len(parts))) if r is not None]
    bad = sum(r.bad for r in reports)
    if bad and spec.strict:
        raise _malformed(reports)
    facts = {"bad": bad, "source": source.name} | {
        name: dict(sum((Counter(getattr(r, name)) for r in reports), Counter())) for name in ("causes", "notes")
    }
    checks_masks = spec.templates is not None and spec.task not in CLASSIFIERS
    if checks_masks and not all(r.bad for r in reports):
        found = _certify_first_rows(parts, spec) if certified is None else certified.result()
        facts["mask_faults"] = {
            kind: [count, found.rows, *found.examples[kind]] for kind, count in found.faults.items()
        }
    if spec.task in CLASSIFIERS:
        facts["first_label"] = 0
    if _dated(spec):
        facts["content"] = "dated"  # other tokens tomorrow, and a run that goes on then has the same data
    merge_pieces(scratch, [p.path for p in parts], target, facts)
    seconds = time.monotonic() - began
    manifest = json.loads((target / "manifest.json").read_text())
    rows = manifest.get("units", manifest["rows"])
    log.info(
        f"{source.name}: {rows:,} rows, {manifest['tokens']:,} tokens in {seconds:.1f} s "
        f"({rows / max(seconds, 1e-9):,.0f} rows/s)"
    )


def _certify_first_rows(parts: Sequence[FilePart], spec: EncodeSpec) -> Findings:
    return certify_first_rows(parts, spec, FIRST_ROWS if spec.processor is None else FIRST_IMAGE_ROWS)


def _run_workers(scratch: Path, spec: EncodeSpec, parts: list[FilePart], count: int) -> Future[Findings] | None:
    """Tokenizes in `count` processes. Meanwhile this one checks the loss masks of the first rows; what it finds, or its
    error, is only looked at when all rows are known to be well-formed."""
    job = scratch / "job"
    job.write_text(json.dumps({"spec": asdict(spec), "parts": [asdict(p) for p in parts]}))
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    env = os.environ | {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "megaswift.data.tokenize_worker", str(job), str(i), str(count)],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        for i in range(count)
    ]
    try:
        with ThreadPoolExecutor(1) as beside:
            checks_masks = spec.templates is not None and spec.task not in CLASSIFIERS
            certified = beside.submit(_certify_first_rows, parts, spec) if checks_masks else None
            codes = [w.wait() for w in workers]
    finally:
        for w in workers:
            if w.poll() is None:
                w.kill()
    problems = [Problem(*p) for path in sorted(scratch.glob("error-*.json")) for p in json.loads(path.read_text())]
    if problems:
        raise DataError(list(dict.fromkeys(problems)))
    if any(codes):
        raise DataError(
            Problem(
                "tokenization",
                f"worker processes failed with exit codes {codes}",
                "see their messages above; if they ran out of memory, use a smaller --dataset_num_proc",
            )
        )
    return certified
