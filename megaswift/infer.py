"""`megaswift infer`: chat in the terminal, or answers to a file of prompts, on all available devices."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

from megaswift import log
from megaswift.config.command_parser import CommandParser
from megaswift.config.inference import InferConfig
from megaswift.config.inference_rules import infer_option_problems

USAGE = """\
megaswift infer: interactive chat, or batch inference on a prompt file

  megaswift infer --model DIR                                          chat (/clear, /quit)
  megaswift infer --model DIR --dataset q.jsonl --result_path a.jsonl  prompt file
  megaswift infer --model DIR --adapters OUT/adapter --max_memory 0:20GiB,cpu:64GiB --offload_folder /disk/tmp"""
HINTS = {
    "do_sample": "--temperature: above 0 samples, 0 is greedy",
    "stream": "output is always streamed",
    "merge_lora": "use --merge_adapters, or megaswift export --merge_lora true",
    "ckpt_dir": "--adapters",
    "output_dir": "--result_path FILE",
    "tp": "--device_map auto places a model over all GPUs",
    "max_length": "--max_new_tokens",
}
COMMAND = CommandParser("infer", USAGE, InferConfig, infer_option_problems, HINTS)


def main(argv: Sequence[str]) -> int:
    """The command; returns the exit code, or raises a UserError."""
    return COMMAND.run(argv, _main)


def _main(cfg: InferConfig) -> int:
    try:
        return _run(cfg)
    except KeyboardInterrupt:
        log.info("stopped" + ("; the same command resumes" if cfg.file.dataset else ""))
        return 128 + signal.SIGINT


def _run(cfg: InferConfig) -> int:
    from megaswift.inference.precheck import precheck_model

    precheck_model(cfg)  # before what follows imports torch
    from megaswift.data.images import ImageRoot
    from megaswift.inference.chat_inputs import ChatInputRenderer
    from megaswift.inference.generator import Generator, generation_params
    from megaswift.inference.load_generation_model import load_model_and_prompt_device, prepare_model_load
    from megaswift.serve.answer_prompt_file import PromptFileRun, open_journal
    from megaswift.serve.prompt_file_rows import read_prompt_file
    from megaswift.serve.terminal import Terminal

    prepared = prepare_model_load(cfg.weights, cfg.conversation.chat_template)
    home = ImageRoot(Path(cfg.file.dataset).parent if cfg.file.dataset is not None else Path.cwd())
    prompts, sampling = (
        ChatInputRenderer(prepared, cfg.conversation.system, home),
        generation_params(cfg.generation, prepared.generation),
    )

    def load() -> Generator:
        model, device = load_model_and_prompt_device(prepared, cfg.placement)
        return Generator(model, prepared.tokenizer, device)

    if cfg.file.dataset is not None:
        rows = read_prompt_file(cfg.file.dataset, cfg.file.columns, prompts)
        run = PromptFileRun(cfg, rows, open_journal(cfg, Path(prepared.folder)), sampling, prompts)
        log.print_result(f"wrote {run.run(load)}")
        return 0
    prompts.need_template()
    Terminal(load(), prompts, sampling, cfg.generation.max_new_tokens, cfg.generation.stop).run()
    return 0
