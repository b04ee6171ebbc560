"""Section `retrieval`: embedding models and rerankers. The formulas are in `megaswift.losses.retrieval`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megaswift.losses.options.loss_table import loss_names
from megaswift.options.option import option
from megaswift.options.tasks import EMBEDDING, RERANKERS, RETRIEVAL

POOLINGS = ("last", "mean", "cls", "weightedmean")
DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
INFONCE = ("infonce",)
MARGINS = ("contrastive", "online_contrastive")


def retrieval_loss_of(c: Any) -> str:
    """Return the loss of a run of these tasks."""
    given: tuple[str, ...] = c.preference.loss_type
    return given[0] if given else loss_names(c.task)[0]


@dataclass(frozen=True)
class RetrievalConfig:
    """Embedding models and rerankers"""

    pooling: str | None = option(
        None,
        "How a text's vectors become one; default: the model folder's, else last",
        choices=POOLINGS,
        spellings={"lasttoken": "last", "last_token": "last"},
        tasks=EMBEDDING,
        common=EMBEDDING,
        metavar="NAME",
    )
    query_prompt: str | None = option(
        None,
        "Text before each query; default: the model folder's prompt",
        tasks=EMBEDDING,
        common=EMBEDDING,
        metavar="TEXT",
        free_text=True,
    )
    document_prompt: str | None = option(
        None,
        "Text before each document; default: the model folder's prompt",
        tasks=EMBEDDING,
        metavar="TEXT",
        free_text=True,
    )
    max_negatives: int | None = option(
        None,
        "Negatives of a row that are read, the first ones; default: all",
        minimum=0,
        unit="texts",
        tasks=RETRIEVAL,
        metavar="N",
    )
    infonce_temperature: float = option(
        0.1,
        "Temperature of infonce: similarities are divided by it",
        above=0,
        tasks=EMBEDDING,
        only_with={"loss_type": INFONCE},
    )
    infonce_use_batch: bool = option(
        True,
        "Negatives are the documents of all rows of a micro-batch, over all ranks",
        tasks=EMBEDDING,
        only_with={"loss_type": INFONCE},
        neutral=(True,),
    )
    infonce_directions: tuple[str, ...] = option(
        ("query_to_doc",),
        "Similarities in the denominator of infonce",
        choices=DIRECTIONS,
        tasks=EMBEDDING,
        only_with={"loss_type": INFONCE, "infonce_use_batch": True},
        neutral=(("query_to_doc",),),
        metavar="NAME...",
    )
    infonce_false_negative_margin: float | None = option(
        None,
        "Leave out negatives that are closer than the positive by more than this",
        minimum=0,
        tasks=EMBEDDING,
        only_with={"loss_type": INFONCE},
    )
    contrastive_margin: float = option(
        0.5,
        "Cosine distance beyond which negatives of contrastive losses have no loss",
        above=0,
        tasks=EMBEDDING,
        only_with={"loss_type": MARGINS},
    )
    matryoshka_dims: tuple[int, ...] = option(
        (),
        "Widths to which embeddings are cut, each with a loss (arXiv:2205.13147)",
        minimum=1,
        tasks=EMBEDDING,
        metavar="N...",
    )
    matryoshka_weights: tuple[float, ...] = option(
        (), "Weight of each of matryoshka_dims; default: 1 each", above=0, tasks=EMBEDDING, metavar="NUMBER..."
    )
    reranker_template: str | None = option(
        None,
        "Text of {query}, {document} and {instruction}; default: Qwen3-Reranker's",
        tasks=RERANKERS,
        metavar="TEXT",
        free_text=True,
        common=RERANKERS,
    )
    reranker_instruction: str | None = option(
        None,
        "{instruction} of rows without a system message; default: that of web search",
        tasks=RERANKERS,
        metavar="TEXT",
        free_text=True,
        common=RERANKERS,
    )
    listwise_temperature: float = option(
        1.0,
        "Temperature of listwise losses: scores are divided by it",
        above=0,
        tasks=RERANKERS,
        only_with={"loss_type": ("listwise_reranker", "listnet_reranker")},
    )
    positive_token: str = option(
        "yes", "Token whose logit says that a document is relevant", tasks=("generative_reranker",), metavar="TOKEN"
    )
    negative_token: str = option(
        "no", "Token whose logit says that a document is not relevant", tasks=("generative_reranker",), metavar="TOKEN"
    )
