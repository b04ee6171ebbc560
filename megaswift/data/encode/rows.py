"""Encodes rows as tokens and loss masks, in one process.

Owns tokenizing in batches and turning character spans into token masks, exactly. Everything it needs comes in
`EncodeSpec`, plain values that travel to worker processes; reading files belongs to `sources/files.py`, keeping
the result to `store/token_store.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer, processors

from megaswift.data.encode.encoder_text import EncoderTexts, EncoderTokenizer
from megaswift.data.encode.pieces import DistinctPieceEncoder
from megaswift.data.encode.split_points import token_safe_split_patterns
from megaswift.data.formats import parse_sample
from megaswift.data.groups.rows import GroupTexts
from megaswift.data.options.agent_templates import AGENT_FORMATS, AGENT_TEXTS, REFUSED_AGENT_FORMATS
from megaswift.data.options.loss_scale import ASSISTANT_TURNS, LossScale, parse_loss_scale
from megaswift.data.row_counters import CUT_TEXTS, EMPTY_ANSWERS, PLAIN_TEXT
from megaswift.data.sources.columns import fill_self_cognition_name_placeholders, rename_columns
from megaswift.data.sources.files import FilePart
from megaswift.data.sources.readers import LocatedRow
from megaswift.data.store.shared_build import data_cache_folder
from megaswift.data.templates.chosen import read_system_message
from megaswift.data.templates.render import (
    ChatRenderer,
    ChatTemplateTexts,
    RenderedConversation,
    load_chat_templates,
)
from megaswift.data.tokenizer import backend_tokenizer_from_json
from megaswift.data.untokenized_sample import RowError, UntokenizedSample, with_default_system_message
from megaswift.data.vision.placeholders import reject_media
from megaswift.data.vision.processor import Processor, ProcessorFolderWithDigest, tokenizer_of_tokenizer_or_processor
from megaswift.errors import ConfigError, DataError, Problem, without_control_characters
from megaswift.losses.options.classification import default_problem_type
from megaswift.models.encoders import is_encoder
from megaswift.models.family import read_config_json
from megaswift.models.vision import has_vision_tower
from megaswift.options.plugins import sources_of_data_formats
from megaswift.options.tasks import CLASSIFIERS, RETRIEVAL

BATCH = 256
SHOWN = 10
"""Malformed rows that are listed one by one."""


@dataclass(frozen=True)
class EncodeSpec:
    """How rows become tokens; equal specs and equal files give equal tokens."""

    task: str
    tokenizer: str
    """The fast tokenizer as JSON."""
    eos_id: int | None
    templates: ChatTemplateTexts | None
    loss_scale: LossScale = ASSISTANT_TURNS
    system: str | None = None
    columns: dict[str, str] = field(default_factory=dict)
    """File column -> canonical column."""
    placeholders: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Text in rows -> what replaces it."""
    strict: bool = True
    begin: list[int] = field(default_factory=list)
    """Tokens before a plain text: what the tokenizer itself puts there."""
    splits_special_tokens: bool = False
    """Whether special tokens in a text are encoded as any other text (`split_special_tokens` of the tokenizer)."""
    processor: ProcessorFolderWithDigest | None = None
    """The processor of a model that reads images."""
    text_part: bool = False
    """Whether the tokenizer is that of a vision-language model, of which the run trains the language model alone."""
    image_folder: str = ""
    """Where images go that the data file itself holds."""
    class_names: list[str] = field(default_factory=list)
    """For classifiers: the names of classes in the order of their numbers; empty where they have none."""
    num_labels: int = 0
    """For classifiers: the number of classes, or of numbers of a text."""
    problem_type: str = ""
    """For classifiers of texts: the kind of label."""
    end: list[int] = field(default_factory=list)
    """For classifiers: tokens after a plain text, those that the tokenizer itself puts there."""
    groups: GroupTexts | None = None
    """How the rows of embedding models and rerankers become texts."""
    encoder: EncoderTexts | None = None
    """How the texts of an encoder become tokens; None for other models."""
    plugins: list[tuple[str, str]] = field(default_factory=list)
    """Path and SHA-256 of files of `--external_plugins` that have registered data formats; an empty path: a script has
    registered some, which are in this process alone."""


@dataclass
class EncodedRows:
    """Tokens of some rows. `lengths[i]` tokens belong to row i; `mask` holds their loss weights, uint8 where all are 0
    or 1 and float32 otherwise."""

    tokens: np.ndarray
    mask: np.ndarray
    lengths: np.ndarray
    lines: np.ndarray
    problems: list[Problem]
    bad: int = 0
    values: np.ndarray | None = None
    """float32: [units] margins or labels of preferences, [rows, n] labels of texts for classifiers; with `sizes`, one a
    document."""
    causes: dict[str, int] = field(default_factory=dict)
    """The causes among the bad rows: units that could be read but are of no use."""
    beside: list[str] = field(default_factory=list)
    """JSON that each row keeps beside its tokens; none where no row does."""
    notes: dict[str, int] = field(default_factory=dict)
    """What is counted of rows that are kept (`data.row_counters.NOTES`)."""
    first_label: int = 1
    """The first token of a row that may have a label; 1 where labels are next tokens."""
    sizes: np.ndarray | None = None
    """int64, one a unit: its documents, where units differ."""


def encode_spec(data: Any, reader: Any, task: str, groups: GroupTexts | None = None) -> EncodeSpec:
    """The spec of a run's options and tokenizer (or processor); DataError when they cannot work together. `groups`: how
    rows of embedding models and rerankers become texts."""
    if task in RETRIEVAL and groups is None:
        what = "is possible for a run, but not for megaswift data show or a cached data set"
        raise DataError(Problem(f"--task_type {task}", what, "give the rows themselves to megaswift sft"))
    tokenizer = tokenizer_of_tokenizer_or_processor(reader)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise DataError(
            Problem(
                f"the tokenizer of {tokenizer.name_or_path or 'the model'}",
                "has no tokenizer.json (fast tokenizer)",
                "save a fast version: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)",
            )
        )
    if task == "pt" and tokenizer.eos_token_id is None:
        raise DataError(
            Problem(
                f"the tokenizer of {tokenizer.name_or_path or 'the model'}",
                "has no end-of-text token (eos_token), which is appended to documents",
            )
        )
    labels = data.named_labels or 0
    if task in CLASSIFIERS and not labels:
        raise DataError(Problem("--num_labels", "is missing", "--num_labels N, or --class_names with a name for each"))
    plain = task in ("pt", "token_cls", *RETRIEVAL) or (not tokenizer.chat_template and data.chat_template is None)
    plain = plain or not data.use_chat_template
    begin, end = _around(tokenizer)
    return EncodeSpec(
        task=task,
        tokenizer=backend.to_str(),
        eos_id=tokenizer.eos_token_id,
        templates=None if plain else _templates(data, tokenizer),
        begin=begin,
        end=end if task in CLASSIFIERS else [],
        class_names=list(data.class_names),
        num_labels=labels,
        problem_type=data.problem_type or (default_problem_type(labels) if task == "seq_cls" else ""),
        splits_special_tokens=bool(getattr(tokenizer, "split_special_tokens", False)),
        loss_scale=parse_loss_scale(data.loss_scale),
        system=read_system_message(data.system),
        columns=dict(data.columns),
        placeholders={k: v for k, v in (("{{NAME}}", data.model_name), ("{{AUTHOR}}", data.model_author)) if v},
        strict=data.strict,
        processor=reader.spec if isinstance(reader, Processor) else None,
        text_part=not isinstance(reader, Processor) and _is_of_vision_model(tokenizer),
        image_folder=str(data_cache_folder(data.dataset_cache_dir) / "images") if isinstance(reader, Processor) else "",
        groups=groups,
        encoder=_encoder_texts(data, tokenizer),
        plugins=sources_of_data_formats(),
    )


def _is_of_vision_model(tokenizer: Any) -> bool:
    return has_vision_tower(_config_beside(tokenizer))


def _config_beside(tokenizer: Any) -> dict[str, Any]:
    """The config.json of a tokenizer's folder; empty where it has none."""
    folder = Path(str(tokenizer.name_or_path))
    return dict(read_config_json(folder)) if (folder / "config.json").is_file() else {}


def _encoder_texts(data: Any, tokenizer: Any) -> EncoderTexts | None:
    """How an encoder's texts become tokens; None for other models."""
    if not is_encoder(_config_beside(tokenizer)):
        return None
    types = "token_type_ids" in tokenizer.model_input_names
    return EncoderTexts(types, data.max_length if data.truncation_strategy == "right" else 0)


def _templates(data: Any, tokenizer: Any) -> ChatTemplateTexts:
    """The chat templates of a run."""
    templates = load_chat_templates(tokenizer, data.chat_template, data.enable_thinking)
    return replace(
        with_agent_template(templates, data.agent_template), keep_empty_reasoning=data.add_non_thinking_prefix
    )


def with_agent_template(templates: ChatTemplateTexts, name: str | None) -> ChatTemplateTexts:
    """The templates under `--agent_template`; ConfigError where they do not write tool calls as it says."""
    if name in REFUSED_AGENT_FORMATS:
        raise ConfigError(Problem(f"--agent_template {name}", *REFUSED_AGENT_FORMATS[name]))
    if name in AGENT_TEXTS:
        return replace(templates, agent_text=name)
    if name is not None:
        call = ChatRenderer(templates).rendered_tool_call()
        if AGENT_FORMATS[name] not in call:
            how = f"as {call[-120:]!r}" if call else "not at all"
            rule = f"the chat template writes tool calls otherwise: {how}"
            fix = "leave it out, or give another template (--template qwen3, or FILE.jinja)"
            raise ConfigError(Problem(f"--agent_template {name}", rule, fix))
    return templates


def _around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens that the tokenizer puts before and after a text."""
    bare = tokenizer("x", add_special_tokens=False)["input_ids"]
    full = tokenizer("x")["input_ids"]
    if not bare:
        return [], []
    begin = full.index(bare[0])
    return list(full[:begin]), list(full[begin + len(bare) :])


def token_range_of_characters(encoding: Encoding, begin: int, end: int, length: int) -> tuple[int, int]:
    """Tokens that cover any of the characters [begin, end) of a text of `length` characters."""
    count = len(encoding)
    if begin >= end:
        return 0, 0
    first = encoding.char_to_token(begin)
    while first is None and begin + 1 < end:  # a character that the normalizer dropped
        begin += 1
        first = encoding.char_to_token(begin)
    if first is None:
        return 0, 0
    last = encoding.char_to_token(end) if end < length else count
    while last is None and end < length:
        end += 1
        last = encoding.char_to_token(end) if end < length else count
    if last is not None and last < count:
        chars = encoding.token_to_chars(last)
        if chars is not None and chars[0] < end:  # one token over both sides of the edge
            last += 1
    return first, count if last is None else last


class RowEncoder:
    """Turns located rows into tokens and masks."""

    first_label = 1
    """The first token of a row that may have a label; 1 where labels are next tokens."""

    def __init__(self, spec: EncodeSpec) -> None:
        self.spec = spec
        self._tokenizer: Tokenizer = backend_tokenizer_from_json(spec.tokenizer)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        # adds nothing here, but would trim white space off the offsets
        self._tokenizer.post_processor = processors.Sequence([])
        self._tokenizer.encode_special_tokens = spec.splits_special_tokens  # which its JSON leaves out
        self._chat = ChatRenderer(spec.templates, spec.loss_scale) if spec.templates is not None else None
        self._end = spec.eos_id if spec.task == "pt" else None
        self._weighted = any(table.weights - {0.0, 1.0} for table in spec.loss_scale.tables)
        """Whether a token may have another loss weight than 0 and 1."""
        self.encoder = None
        """The tokenizer of an encoder."""
        if spec.encoder is not None:
            self.encoder = EncoderTokenizer(spec.tokenizer, spec.encoder, spec.splits_special_tokens)
        self.keeps = spec.processor is not None
        """Whether rows keep something beside their tokens."""
        cuts = None if spec.splits_special_tokens else token_safe_split_patterns(self._tokenizer)
        self._pieces = (
            DistinctPieceEncoder(self._tokenizer, cuts, token_range_of_characters) if cuts is not None else None
        )

    @property
    def tokenizer(self) -> Tokenizer:
        """Adds no special tokens and no padding, and its offsets hold white space."""
        return self._tokenizer

    def token_text(self, token: int | None) -> str:
        """A token as it stands in texts; nothing where there is none."""
        return "" if token is None else str(self._tokenizer.id_to_token(token))

    def named(self, row: Any) -> dict[str, Any]:
        """A row under the run's column names, placeholders filled in."""
        if isinstance(row, RowError):
            raise row
        named = rename_columns(row, self.spec.columns) if self.spec.columns else row
        return fill_self_cognition_name_placeholders(named, self.spec.placeholders) if self.spec.placeholders else named

    def sample(self, row: Any) -> UntokenizedSample:
        """The sample of a row, with the run's column names and system message."""
        sample = parse_sample(self.named(row), self.spec.task)
        if sample.text is not None and self.spec.task != "pt" and self.spec.system:
            fault = "plain text, which is trained without a chat template, so --system cannot be applied"
            column = "text" if sample.prompt is None else "prompt"
            raise RowError(column, fault, "messages, or omit --system")
        return with_default_system_message(sample, self.spec.system)

    def located(self, path: str, row: Any) -> RenderedConversation:
        """`render` for a row of the file `path`."""
        return self.render(row)

    def render(self, row: Any) -> RenderedConversation:
        """The text of a row and its loss spans."""
        sample = self.sample(row)
        reject_media(self.named(row), sample, self.spec.text_part)
        return self.rendered(sample)

    def rendered(self, sample: UntokenizedSample) -> RenderedConversation:
        """The text of a sample and its loss spans."""
        if sample.prompt is not None:
            return self._completed(sample.prompt, sample.text or "")
        if sample.text is not None:
            text = sample.text
            notes: tuple[str, ...] = ()
            if self.spec.task != "pt":  # which appends the token itself
                text = self._ended(text)
                notes = (PLAIN_TEXT,)
            return RenderedConversation(text, ((0, len(text)),), notes=notes, plain=True)
        if self._chat is None:
            raise RowError(
                "messages", "the tokenizer has no chat template", "--chat_template FILE.jinja (or the template text)"
            )
        rendered = self._chat.render(sample)
        reject_lone_surrogates(rendered.text)
        return rendered

    def _completed(self, prompt: str, whole: str) -> RenderedConversation:
        """A plain prompt and its completion, which ends with the end-of-text token and carries the loss."""
        text = self._ended(whole)
        notes = () if whole[len(prompt) :].strip() else (EMPTY_ANSWERS,)
        begin = 0 if self.spec.loss_scale.turns == "all" else len(prompt)
        return RenderedConversation(text, ((begin, len(text)),), notes=notes, plain=True)

    def _ended(self, text: str) -> str:
        end = self.token_text(self.spec.eos_id)
        return text if text.endswith(end) else text + end

    def tokenize(self, rendered: Sequence[RenderedConversation]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(int32 tokens [n], loss weights [n]) of each text; the weights are uint8 where all are 0 or 1."""
        tokens = (
            self._tokenize_whole(rendered) if self._pieces is None else self._tokenize_pieces(self._pieces, rendered)
        )
        if not self.spec.begin:
            yield from tokens
            return
        begin = np.array(self.spec.begin, dtype=np.int32)
        for text, (ids, mask) in zip(rendered, tokens, strict=True):
            if text.plain and (not len(ids) or ids[0] != begin[0]):  # else the row brings it along
                ids = np.concatenate([begin, ids])
                mask = np.concatenate([np.zeros(len(begin), np.uint8), mask])
            yield ids, mask

    def _tokenize_pieces(
        self, pieces: DistinctPieceEncoder, rendered: Sequence[RenderedConversation]
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        encoded = pieces.encode(
            [r.text for r in rendered],
            [() if self._end is not None else r.spans for r in rendered],
            [r.weights for r in rendered] if self._weighted else None,
        )
        begin = 0
        for end in encoded.ends.tolist():
            ids = encoded.ids[begin:end]
            if self._end is None:
                yield ids, encoded.mask[begin:end]
            else:
                yield np.append(ids, np.int32(self._end)), np.ones(len(ids) + 1, dtype=np.uint8)
            begin = end

    def _tokenize_whole(self, rendered: Sequence[RenderedConversation]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The same for any tokenizer, by the characters that tokens come from."""
        encodings = self._tokenizer.encode_batch([r.text for r in rendered], add_special_tokens=False)
        for text, encoding in zip(rendered, encodings, strict=True):
            ids = np.array(encoding.ids if self._end is None else [*encoding.ids, self._end], dtype=np.int32)
            mask = np.zeros(len(ids), dtype=np.float32 if self._weighted else np.uint8)
            if self._end is not None:
                mask[:] = 1
            else:
                for (a, b), weight in zip(text.spans, text.weights or (1.0,) * len(text.spans), strict=True):
                    first, last = token_range_of_characters(encoding, a, b, len(text.text))
                    mask[first:last] = weight
            yield ids, mask

    def encode(self, rows: Iterable[tuple[str, LocatedRow]]) -> EncodedRows:
        """All rows at once; malformed ones are counted and the first few told."""
        tokens: list[np.ndarray] = []
        masks: list[np.ndarray] = []
        lines: list[int] = []
        beside: list[str] = []
        labels: list[tuple[float, ...]] = []
        problems: list[Problem] = []
        notes: Counter[str] = Counter()
        bad = 0
        rows = iter(rows)
        while group := list(islice(rows, BATCH)):
            good: list[RenderedConversation] = []
            for path, located in group:
                try:
                    good.append(self.located(path, located.row))
                    lines.append(located.line)
                except RowError as e:
                    bad += 1
                    if len(problems) < SHOWN:
                        problems.append(malformed_row_problem(path, located.line, e))
            for ids, mask in self.tokenize(good):
                tokens.append(ids)
                masks.append(mask)
            notes.update(note for r in good for note in r.notes)
            beside += [getattr(r, "beside", "") for r in good] if self.keeps else []
            labels += [r.label for r in good if hasattr(r, "label")]
        if self.encoder is not None and self.encoder.cut:
            notes[CUT_TEXTS] = self.encoder.cut
            self.encoder.cut = 0
        lengths = np.array([len(t) for t in tokens], dtype=np.int64)
        flat = np.concatenate(tokens) if tokens else np.zeros(0, dtype=np.int32)
        return EncodedRows(
            flat,
            np.concatenate(masks) if masks else np.zeros(0, dtype=np.uint8),
            lengths,
            np.array(lines, dtype=np.int64),
            problems,
            bad,
            np.array(labels, dtype=np.float32) if labels else None,
            beside=beside,
            notes=dict(notes),
            first_label=self.first_label,
        )

    def encode_part(self, part: FilePart) -> EncodedRows:
        """The rows of a part of a file."""
        return self.encode((part.path, located) for located in part.rows())


def reject_lone_surrogates(text: str) -> None:
    """RowError for a text that no tokenizer takes: a template, or --system, may bring halves of surrogate pairs."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as e:
            fault = f"an unpaired surrogate (\\u{ord(text[e.start]):04x}) after rendering"
            raise RowError("messages", fault, "complete characters in the chat template and in --system") from None


def malformed_row_problem(path: str, line: int, error: RowError) -> Problem:
    """A malformed row for the user: file, line, place in it, what was found and what was expected."""
    place = f"{without_control_characters(path)}:{line}"
    return Problem(place, f"{error.where}: {error.found}; expected {error.expected}", error.fix)
