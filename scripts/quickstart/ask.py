"""Ask a model folder the held-out questions with transformers and count the exact answers.

    python scripts/quickstart/ask.py MODEL_FOLDER HELDOUT.jsonl [--show 3]

Owns the quickstart's score: greedy answers, equal to the expected sentence to the letter, or wrong.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

MOST_NEW_TOKENS = 16


def read(path: Path) -> list[tuple[str, str]]:
    """(question, expected answer) of each line."""
    rows = [json.loads(line)["messages"] for line in path.read_text(encoding="utf-8").splitlines()]
    return [(question["content"], answer["content"]) for question, answer in rows]


def answers(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, questions: list[str]) -> list[str]:
    """Greedy answers to all questions in one batch."""
    chats = [[{"role": "user", "content": q}] for q in questions]
    tokenizer.padding_side = "left"
    batch = tokenizer.apply_chat_template(chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True)
    batch = batch.to(model.device)
    with torch.inference_mode():
        out = model.generate(**batch, max_new_tokens=MOST_NEW_TOKENS, do_sample=False)
    return tokenizer.batch_decode(out[:, batch["input_ids"].shape[1]:], skip_special_tokens=True)


def main() -> None:
    """Print some answers and the share of exact ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("heldout", type=Path)
    parser.add_argument("--show", type=int, default=0, help="print the first N answers")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(device).eval()
    asked = read(args.heldout)
    given = answers(model, tokenizer, [question for question, _ in asked])
    for (question, expected), answer in list(zip(asked, given, strict=True))[: args.show]:
        print(f"  Q: {question}\n  A: {answer!r}" + ("" if answer == expected else f"   (expected {expected!r})"))
    right = sum(answer == expected for (_, expected), answer in zip(asked, given, strict=True))
    print(f"exact answers to held-out questions: {right} of {len(asked)} ({100 * right / len(asked):.0f}%)")


if __name__ == "__main__":
    main()
