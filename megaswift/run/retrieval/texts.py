"""How the rows of a run become texts, from its options, the model's own files and its tokenizer; and the files of
sentence-transformers for what it trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megaswift.config import SwiftConfig
from megaswift.data.groups.rows import ANY, BINARY, GRADED, PAIRED, GroupTexts
from megaswift.errors import ConfigError, Problem
from megaswift.folders.embedding_files import (
    MODULES,
    SETTINGS,
    EmbeddingFiles,
    embedding_files,
    read_embedding_files,
)
from megaswift.losses.options.retrieval import retrieval_loss_of
from megaswift.models.encoders import is_encoder
from megaswift.models.family import read_config_json

WANTED = {"infonce": PAIRED, "cosine_similarity": GRADED, "cosent": GRADED}
"""What an embedding's loss asks of a row; others take two texts with a label of 0 or 1."""
CHATML = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n"
    "<think>\n\n</think>\n\n"
)
"""The text of Qwen3-Reranker."""
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""The instruction of Qwen3-Reranker."""
TRANSFORMER = {
    "idx": 0,
    "name": "0",
    "path": "",
    "type": "sentence_transformers.base.modules.transformer.Transformer",
}
"""The first module of a CrossEncoder."""
SIGMOID = "torch.nn.modules.activation.Sigmoid"
PLAIN = "Instruction: {instruction}\nQuery: {query}\nDocument: {document}\nRelevant:"
"""For tokenizers without the tokens of ChatML."""


def embedding_settings(cfg: SwiftConfig, folder: Path) -> EmbeddingFiles:
    """Return how a run's embeddings are made: by its options, else as the model's folder says, else from the last
    token, or from all tokens of an encoder, without prompts. A folder's prompts are for queries and documents, so
    losses on labeled pairs do without."""
    plain = EmbeddingFiles("mean" if is_encoder(read_config_json(folder)) else "last")
    found = read_embedding_files(folder, f"--model {cfg.model.model}") or plain
    options = cfg.retrieval
    roles = retrieval_loss_of(cfg) == "infonce"
    query = options.query_prompt if options.query_prompt is not None else found.query_prompt * roles
    document = options.document_prompt if options.document_prompt is not None else found.document_prompt * roles
    prompts = found.prompts
    if query != found.query_prompt * roles or document != found.document_prompt * roles:
        prompts = found.with_prompts(query, document)
    return EmbeddingFiles(options.pooling or found.pooling, prompts, found.normalizes, found.max_length)


def group_texts(cfg: SwiftConfig, folder: Path, tokenizer: Any) -> GroupTexts:
    """Return how the run's rows become texts."""
    cut = "right" if cfg.data.truncation_strategy == "right" else ""
    most = cfg.data.max_length if cut else 0
    options = cfg.retrieval
    if cfg.task != "embedding":
        if is_encoder(read_config_json(folder)):
            return GroupTexts(ANY, pairs=True, max_negatives=options.max_negatives)
        template = reranker_template(cfg, tokenizer)
        return GroupTexts(ANY, "", "", template, instruction_of(cfg), options.max_negatives, cut, most)
    files = embedding_settings(cfg, folder)
    loss = retrieval_loss_of(cfg)
    roles = loss == "infonce"
    query = options.query_prompt if options.query_prompt is not None else files.query_prompt * roles
    document = options.document_prompt if options.document_prompt is not None else files.document_prompt * roles
    return GroupTexts(WANTED.get(loss, BINARY), query, document, "", "", options.max_negatives, cut, most)


def instruction_of(cfg: SwiftConfig) -> str:
    """Return the instruction of rows that have none."""
    given = cfg.retrieval.reranker_instruction
    return INSTRUCTION if given is None else given


def reranker_template(cfg: SwiftConfig, tokenizer: Any) -> str:
    """Return the text of a query and a document."""
    given = cfg.retrieval.reranker_template
    if given is not None:
        return given
    known = tokenizer.get_vocab()
    return CHATML if "<|im_start|>" in known and "<|im_end|>" in known else PLAIN


def score_tokens(cfg: SwiftConfig, tokenizer: Any) -> tuple[int, int]:
    """Return the ids of the tokens whose logits are compared; ConfigError where a text is not one token."""
    ids = []
    for name in ("positive_token", "negative_token"):
        text = getattr(cfg.retrieval, name)
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(tokens) != 1:
            rule = f"is {len(tokens)} tokens of this model, {tokenizer.convert_ids_to_tokens(tokens)}"
            raise ConfigError(Problem(f"--{name} {text}", rule, "give a text that is one token"))
        ids.append(int(tokens[0]))
    return ids[0], ids[1]


def side_files(cfg: SwiftConfig, folder: Path, hidden_size: int, tokenizer: Any) -> dict[str, str]:
    """Return the texts of the files of sentence-transformers beside what the run exports, by path."""
    if cfg.task == "embedding":
        files = embedding_settings(cfg, folder)
        length = files.max_length or cfg.data.max_length
        return embedding_files(EmbeddingFiles(files.pooling, files.prompts, files.normalizes, length), hidden_size)
    if is_encoder(read_config_json(folder)):
        return _encoder_reranker_files(folder)
    return _reranker_files(cfg, tokenizer)


def _encoder_reranker_files(folder: Path) -> dict[str, str]:
    """The files of a CrossEncoder that reads pairs of texts. What becomes of a score is as in the folder of the model,
    or the sigmoid, which CrossEncoder takes where nothing is said."""
    config = read_config_json(folder)
    settings = json.loads((folder / SETTINGS).read_text("utf-8")) if (folder / SETTINGS).is_file() else {}
    own = config.get("sentence_transformers")
    activation = settings.get("activation_fn") or (own.get("activation_fn") if isinstance(own, dict) else None)
    activation = activation or config.get("sbert_ce_default_activation_function") or SIGMOID
    texts: dict[str, Any] = {
        MODULES: [TRANSFORMER],
        SETTINGS: {"model_type": "CrossEncoder", "prompts": {}, "activation_fn": activation},
        "sentence_bert_config.json": {
            "transformer_task": "sequence-classification",
            "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
            "module_output_name": "scores",
        },
    }
    return {path: json.dumps(value, indent=2) + "\n" for path, value in texts.items()}


def _reranker_files(cfg: SwiftConfig, tokenizer: Any) -> dict[str, str]:
    """The files of a CrossEncoder: a chat template that writes the same text as in training, and the tokens of the
    score."""
    generative = cfg.task == "generative_reranker"
    modules: list[dict[str, Any]] = [TRANSFORMER]
    texts: dict[str, Any] = {}
    output = {"method": "forward", "method_output_name": "logits"}
    if generative:
        kind = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
        modules.append({"idx": 1, "name": "1", "path": "1_LogitScore", "type": kind})
        positive, negative = score_tokens(cfg, tokenizer)
        texts["1_LogitScore/config.json"] = {"true_token_id": positive, "false_token_id": negative}
    texts[MODULES] = modules
    texts[SETTINGS] = {
        "model_type": "CrossEncoder",
        "prompts": {"query": instruction_of(cfg)},
        "default_prompt_name": "query",
        "activation_fn": "torch.nn.modules.linear.Identity",
    }
    texts["sentence_bert_config.json"] = {
        "transformer_task": "text-generation" if generative else "sequence-classification",
        "modality_config": {"text": output, "message": {**output, "format": "flat"}},
        "module_output_name": "causal_logits" if generative else "scores",
    }
    written = {path: json.dumps(value, indent=2, ensure_ascii=False) + "\n" for path, value in texts.items()}
    return {**written, "chat_template.jinja": reranker_chat_template(cfg, tokenizer)}


def reranker_chat_template(cfg: SwiftConfig, tokenizer: Any) -> str:
    """Return a Jinja template that renders messages of the roles system, query and document as the text on which the
    run trains, with the special tokens that the tokenizer puts around it."""
    before, behind = _special_texts(tokenizer)
    template = before + reranker_template(cfg, tokenizer) + behind

    def content(role: str) -> str:
        return "{{ messages | selectattr('role', 'eq', '" + role + "') | map(attribute='content') | first }}"

    default = _literal(instruction_of(cfg))
    instruction = (
        "{{ messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first | default("
        + default
        + ", true) }}"
    )
    words = {"{query}": content("query"), "{document}": content("document"), "{instruction}": instruction}
    pieces = []
    rest = template
    while rest:
        found = min((word for word in words if word in rest), key=rest.index, default=None)
        if found is None:
            pieces.append("{{ " + _literal(rest) + " }}")
            break
        text, _, rest = rest.partition(found)
        pieces += ["{{ " + _literal(text) + " }}"] * bool(text) + [words[found]]
    return "".join(pieces)


def _literal(text: str) -> str:
    """The text as a string of Jinja."""
    return json.dumps(text, ensure_ascii=False)


def _special_texts(tokenizer: Any) -> tuple[str, str]:
    """The special tokens that the tokenizer puts before and behind a text."""
    bare = tokenizer("x", add_special_tokens=False)["input_ids"]
    whole = tokenizer("x")["input_ids"]
    first = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
    before = tokenizer.convert_ids_to_tokens(whole[:first])
    behind = tokenizer.convert_ids_to_tokens(whole[first + len(bare) :])
    return "".join(before), "".join(behind)
