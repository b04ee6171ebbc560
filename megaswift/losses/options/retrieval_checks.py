"""Rules for options of embedding models and rerankers."""

from __future__ import annotations

from megaswift.config.rule import ConflictingOptions
from megaswift.options.tasks import RETRIEVAL

RETRIEVAL_CLASHES: tuple[ConflictingOptions, ...] = (
    ConflictingOptions(
        ("streaming",),
        lambda c: c.task in RETRIEVAL and c.data.streaming,
        "is not possible: all ranks must know how many documents the largest row has",
        "--streaming false",
    ),
    ConflictingOptions(
        ("truncation_strategy",),
        lambda c: c.task in RETRIEVAL and c.data.truncation_strategy in ("left", "split"),
        "is not for embedding models and rerankers, which read a text from its beginning to its end",
        "--truncation_strategy right, or delete",
    ),
    ConflictingOptions(
        ("matryoshka_weights", "matryoshka_dims"),
        lambda c: len(c.retrieval.matryoshka_weights) not in (0, len(c.retrieval.matryoshka_dims)),
        "must have one number for each of matryoshka_dims",
        "give --matryoshka_weights as many numbers",
    ),
    ConflictingOptions(
        ("matryoshka_dims",),
        lambda c: len(set(c.retrieval.matryoshka_dims)) < len(c.retrieval.matryoshka_dims),
        "names a width twice",
        "give each width once",
    ),
    ConflictingOptions(
        ("infonce_directions",),
        lambda c: "query_to_doc" not in c.retrieval.infonce_directions,
        "must contain query_to_doc, the direction of the positive",
        "--infonce_directions query_to_doc doc_to_query",
    ),
    ConflictingOptions(
        ("reranker_template",),
        lambda c: (
            c.retrieval.reranker_template is not None
            and any(word not in c.retrieval.reranker_template for word in ("{query}", "{document}"))
        ),
        "must contain {{query}} and {{document}}",
        "--reranker_template 'Query: {{query}} Document: {{document}}'",
    ),
    ConflictingOptions(
        ("positive_token", "negative_token"),
        lambda c: c.retrieval.positive_token == c.retrieval.negative_token,
        "are the same token, so that the score is always 0",
        "--positive_token yes --negative_token no",
    ),
)
