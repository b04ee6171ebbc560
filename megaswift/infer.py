"""`megaswift infer`: a model in the terminal, or on a file of prompts, spread over what devices there are."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

from megaswift import log
from megaswift.config.command import Command
from megaswift.config.inference import InferConfig
from megaswift.config.inference_rules import check_infer

USAGE = """\
megaswift infer: a conversation in the terminal, or the answers to a file of prompts

  megaswift infer --model DIR                                          a conversation (/clear, /quit)
  megaswift infer --model DIR --dataset q.jsonl --result_path a.jsonl  a file
  megaswift infer --model DIR --adapters OUT/adapter --max_memory 0:20GiB,cpu:64GiB --offload_folder /disk/tmp"""
HINTS = {
    "do_sample": "--temperature: above 0 draws, 0 does not",
    "stream": "answers are streamed anyway",
    "merge_lora": "--merge_adapters, or megaswift export --merge_lora true",
    "ckpt_dir": "--adapters",
    "output_dir": "--result_path FILE",
    "tp": "--device_map auto spreads a model over all GPUs",
    "max_length": "--max_new_tokens",
}
COMMAND = Command("infer", USAGE, InferConfig, check_infer, HINTS)


def main(argv: Sequence[str]) -> int:
    """The command; returns the exit code, or raises a UserError."""
    return COMMAND.run(argv, _main)


def _main(cfg: InferConfig) -> int:
    try:
        return _run(cfg)
    except KeyboardInterrupt:
        log.info("stopped" + ("; the same command goes on" if cfg.file.dataset else ""))
        return 128 + signal.SIGINT


def _run(cfg: InferConfig) -> int:
    from megaswift.inference.first_look import look

    look(cfg)  # before what follows imports torch
    from megaswift.data.images import Home
    from megaswift.inference.batch import FileRun, journal
    from megaswift.inference.generator import Generator, sampling_of
    from megaswift.inference.load import load, prepare
    from megaswift.inference.prompts import Prompts
    from megaswift.inference.rows import read
    from megaswift.inference.terminal import Terminal

    prepared = prepare(cfg.weights, cfg.conversation.chat_template)
    home = Home(Path(cfg.file.dataset).parent if cfg.file.dataset is not None else Path.cwd())
    prompts, sampling = (
        Prompts(prepared, cfg.conversation.system, home),
        sampling_of(cfg.generation, prepared.generation),
    )

    def make() -> Generator:
        model, device = load(prepared, cfg.placement)
        return Generator(model, prepared.tokenizer, device)

    if cfg.file.dataset is not None:
        rows = read(cfg.file.dataset, cfg.file.columns, prompts)
        run = FileRun(cfg, rows, journal(cfg, Path(prepared.folder)), sampling, prompts)
        log.result(f"made {run.run(make)}")
        return 0
    prompts.need_template()
    Terminal(make(), prompts, sampling, cfg.generation.max_new_tokens, cfg.generation.stop).run()
    return 0
