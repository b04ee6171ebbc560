"""Ask a model folder the held-out questions with transformers and count the exact answers.

    python scripts/quickstart/ask.py MODEL_FOLDER HELDOUT.jsonl [--show 3] [--before MODEL_FOLDER]

Owns the quickstart's score: greedy answers, equal to the expected sentence to the letter, or wrong.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

MOST_NEW_TOKENS = 8


def read(path: Path) -> list[tuple[str, str]]:
    """(question, expected answer) of each line."""
    rows = [json.loads(line)["messages"] for line in path.read_text(encoding="utf-8").splitlines()]
    return [(question["content"], answer["content"]) for question, answer in rows]


def answers(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, questions: list[str]) -> list[str]:
    """Greedy answers to all questions in one batch."""
    chats = [[{"role": "user", "content": q}] for q in questions]
    tokenizer.padding_side = "left"
    batch = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    batch = batch.to(model.device)
    with torch.inference_mode():
        out = model.generate(**batch, max_new_tokens=MOST_NEW_TOKENS, do_sample=False)
    return tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def score(folder: Path, asked: list[tuple[str, str]], show: int = 0) -> int:
    """Number of exact answers of the model in `folder`; prints the first `show`."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    given = answers(model, tokenizer, [question for question, _ in asked])
    for (question, expected), answer in list(zip(asked, given, strict=True))[:show]:
        print(f"  {question}\n    {answer}" + ("" if answer == expected else f"      (expected: {expected})"))
    return sum(answer == expected for (_, expected), answer in zip(asked, given, strict=True))


def main() -> None:
    """Print some answers, and the score before and after."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="Hugging Face folder")
    parser.add_argument("heldout", type=Path, help="questions with their answers")
    parser.add_argument("--show", type=int, default=0, help="print the first N answers")
    parser.add_argument("--before", type=Path, help="another model to compare with")
    args = parser.parse_args()
    logging.disable_progress_bar()
    asked = read(args.heldout)
    after = score(args.model, asked, args.show)
    if args.before:
        print(
            f"exact answers to {len(asked)} held-out questions, before: "
            f"{100 * score(args.before, asked) / len(asked):.0f}%"
        )
    print(
        f"exact answers to {len(asked)} held-out questions{', after' if args.before else ''}: "
        f"{100 * after / len(asked):.0f}%"
    )


if __name__ == "__main__":
    main()
