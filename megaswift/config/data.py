"""Section `data`: what is read, how rows become token sequences, how they are ordered."""

from __future__ import annotations

from dataclasses import dataclass

from megaswift.config.option import LARGEST_SEED, option

SFT = ("sft",)
PAIRS = ("dpo", "orpo", "cpo", "simpo", "rm")
"""Tasks whose unit is a pair of answers to one prompt, one chosen and one rejected."""
EXAMPLES = ("kto",)
"""Tasks whose unit is one answer with a label: desirable or not."""
PREFERENCES = PAIRS + EXAMPLES
GRPO, PPO = ("grpo",), ("ppo",)
RL = GRPO + PPO
"""Tasks whose rows are prompts, and whose unit is a completion that the model has sampled."""
ALIGNMENT = PREFERENCES + RL
"""Tasks that `rlhf_type` may name."""
CHATS = SFT + ALIGNMENT
"""Tasks of conversations."""


@dataclass(frozen=True)
class DataConfig:
    """Data"""

    dataset: tuple[str, ...] = option(
        (),
        "Files, folders, hub ids; path#500: 500 rows at random, path:subset: a subset",
        aliases=("datasets",),
        metavar="PATH...",
    )
    val_dataset: tuple[str, ...] = option((), "The same for evaluation", aliases=("val_datasets",), metavar="PATH...")
    split_dataset_ratio: float = option(0.0, "Part of the rows that is held out for evaluation", minimum=0, below=1)
    max_length: int = option(
        2048, "Longest sequence", aliases=("seq_length", "max_seq_length", "cutoff_len"), minimum=1, unit="tokens"
    )
    truncation_strategy: str = option(
        "delete", "What happens to longer rows; split: pt only", choices=("raise", "delete", "left", "right", "split")
    )
    packing: bool | None = option(None, "Short rows share one sequence, each apart; unset: on but for sft and pt")
    system: str | None = option(
        None, "System message for rows without one: text, or a file that holds it", tasks=CHATS, metavar="TEXT|FILE"
    )
    loss_scale: str = option(
        "default",
        "Which text carries loss: the assistant's turns, the last round, all",
        choices=("default", "last_round", "all"),
        tasks=SFT,
    )
    columns: dict[str, str] = option(
        {}, "File's columns to ours: instr=query out=response, or JSON", metavar="FROM=TO..."
    )
    sample_by: str = option(
        "line", "What is a document of a .txt or .md file", choices=("line", "document"), tasks=("pt",)
    )
    streaming: bool = option(False, "Read rows as they are needed; needs max_steps")
    shuffle: bool = option(
        True, "New order of rows each epoch", aliases=("dataset_shuffle", "train_dataloader_shuffle")
    )
    data_seed: int | None = option(
        None,
        "Seed of row order, of rows drawn and held out; unset: seed",
        minimum=0,
        maximum=LARGEST_SEED,
        metavar="SEED",
    )
    dataset_num_proc: int = option(
        1, "Processes that tokenise", aliases=("preprocessing_num_workers",), minimum=1, unit="processes"
    )
    dataloader_num_workers: int = option(0, "Threads that read batches ahead", minimum=0, unit="threads")
    chat_template: str | None = option(
        None, "Jinja file or text in place of the tokenizer's template", tasks=CHATS, metavar="FILE"
    )
    strict: bool = option(True, "A malformed row stops the run; false: it is skipped and counted")
    dataset_cache_dir: str | None = option(None, "Where tokenised data is kept; unset: below ~/.cache", metavar="DIR")
