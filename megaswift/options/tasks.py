"""The tasks of training, and the groups of tasks that options name in `tasks=`."""

from __future__ import annotations

TASKS = {
    "sft": "supervised fine-tuning on conversations",
    "pt": "pretraining on plain text",
    "dpo": "preference learning from pairs: DPO and variants",
    "kto": "preference learning from labeled completions: KTO, BCO",
    "orpo": "preference learning without a reference model: ORPO",
    "cpo": "preference learning without a reference model: CPO",
    "simpo": "preference learning without a reference model: SimPO",
    "rm": "reward model training from preference pairs",
    "gkd": "distillation from a teacher, also on own completions: GKD",
    "grpo": "reinforcement learning without a critic: GRPO and variants",
    "ppo": "reinforcement learning with a critic: PPO",
    "seq_cls": "classification of texts, or regression",
    "token_cls": "classification of tokens, such as named entities",
    "embedding": "embedding models: vectors compared by cosine",
    "reranker": "rerankers: a score for a query and a document, by a head",
    "generative_reranker": "rerankers: logit of yes less that of no",
}
EVERY_TASK = tuple(TASKS)
TASK_NAMES = ("task", "rlhf_type", "task_type")
"""Names by which the sources say which task to run."""
CAUSAL_LM = "causal_lm"
"""The `task_type` of a run that trains a language model, whatever its task."""

SFT = ("sft",)
LANGUAGE = ("sft", "pt")
"""Tasks whose loss is that of the next token."""
CLASSIFIERS = ("seq_cls", "token_cls")
"""Tasks whose rows have labels, and whose model ends in a classifier's head."""
EMBEDDING = ("embedding",)
"""Tasks whose loss compares pooled hidden states of texts."""
RERANKERS = ("reranker", "generative_reranker")
"""Tasks whose loss compares a query's documents by scores."""
RETRIEVAL = EMBEDDING + RERANKERS
"""Tasks whose unit is a row of the data set with a query and its documents."""
TASK_TYPES = CLASSIFIERS + RETRIEVAL
"""Tasks that `task_type` may name, in a run of sft."""
SUPERVISED = LANGUAGE + CLASSIFIERS
"""Tasks whose unit is a row of the data set."""
PAIRS = ("dpo", "orpo", "cpo", "simpo", "rm")
"""Tasks whose unit is a pair of answers to one prompt, one chosen and one rejected."""
EXAMPLES = ("kto",)
"""Tasks whose unit is one answer with a label: desirable or not."""
PREFERENCES = PAIRS + EXAMPLES
LIKELIHOODS = ("dpo", "cpo", "simpo", "kto")
"""Preference tasks that compare likelihoods of answers alone (orpo trains on the prompt too, rm on the last token)."""
GRPO = ("grpo",)
PPO = ("ppo",)
RL = GRPO + PPO
"""Tasks whose rows are prompts, and whose unit is a completion that the model has sampled."""
DISTILLATION = ("gkd",)
"""Tasks that learn a teacher's distribution over the next token."""
TAUGHT = DISTILLATION + GRPO
"""Tasks that may have a teacher."""
SAMPLED = RL + DISTILLATION
"""Tasks that may train on completions that are sampled during the run."""
PROMPTED = ("dpo", "cpo", "simpo", "rm", *RL)
"""Tasks with several answers to a prompt that carries no loss."""
WRITERS = (*LANGUAGE, *DISTILLATION, *(task for task in PREFERENCES if task != "rm"), *RL)
"""Tasks whose model writes text."""
ALIGNMENT = PREFERENCES + DISTILLATION + RL
"""Tasks that `rlhf_type` may name."""
DATASETS = (*LANGUAGE, *TASK_TYPES, *DISTILLATION, *PREFERENCES)
"""Tasks that train on the rows of a data set themselves."""
FITTED = (*LANGUAGE, *PREFERENCES, *CLASSIFIERS)
"""Tasks whose settings and layout can be chosen before a run (`--fit`, `--layout auto`)."""
PLANNED = (*FITTED, *RL)
"""Tasks whose memory and time are known before a run (`megaswift plan`)."""
CHATS = (*SFT, "seq_cls", *ALIGNMENT)
"""Tasks of conversations."""
VISION_TASKS = (*SFT, "dpo", "cpo", "simpo", *GRPO)
"""Tasks that vision-language models train on, images and all."""
