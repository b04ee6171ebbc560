"""`megaswift infer`: chat in the terminal, or answers to a file of prompts, on all available devices."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if not __package__:  # run as a file: python has put megaswift/ itself on the path, where it would hide other packages
    _root = str(Path(__file__).resolve().parent.parent)
    sys.path[:] = [_root, *(p for p in sys.path if p != _root and Path(p).resolve() != Path(_root, "megaswift"))]

from megaswift import log
from megaswift.compat.inference import InferenceToolkits
from megaswift.error_exit import exit_worker, print_error_once
from megaswift.errors import ConfigError, Problem, UserError, storage_error
from megaswift.folders.source import with_fetched_adapters
from megaswift.inference.options.checks import infer_option_problems
from megaswift.inference.options.commands import InferConfig, InferProcessOptions
from megaswift.inference.options.launch import LAUNCH_OPTIONS
from megaswift.inference.options.parser import CommandParser, ParsedCommand
from megaswift.inference.options.run_files import complete_infer_options, load_run_config, run_config_file
from megaswift.launchers import torchrun_launcher
from megaswift.launchers.cluster_variables import take_cluster_variables
from megaswift.launchers.options.launch import LaunchConfig
from megaswift.launchers.options.variables import CHECKED, is_launched_worker
from megaswift.launchers.parent_death import PARENT, end_with_parent
from megaswift.options.tasks import RETRIEVAL

if TYPE_CHECKING:
    from megaswift.inference.model import ModelConfigAndTokenizer
    from megaswift.inference.pooling.folder import PoolingFolder
    from megaswift.inference.pooling.model import PoolingModel

USAGE = """\
megaswift infer: interactive chat, or batch inference on a prompt file

  megaswift infer --model DIR                                          chat (/clear, /quit)
  megaswift infer --model DIR --dataset q.jsonl --result_path a.jsonl  prompt file
  megaswift infer --adapters OUT/adapter --load_data_args true         validation rows of the run
  megaswift infer --model CLASSIFIER [--dataset texts.jsonl]           labels, scores or embeddings
  megaswift infer --model DIR --max_memory 0:20GiB,cpu:64GiB --offload_folder /disk/tmp"""
STOPPED = "stopped; the same command resumes"
LOOK_SECONDS = 0.5
DEVICES = "CUDA_VISIBLE_DEVICES"


def _complete(parsed: ParsedCommand) -> ParsedCommand:
    return complete_infer_options(with_fetched_adapters(parsed, "weights"))


COMMAND = CommandParser("infer", USAGE, InferConfig, InferenceToolkits("infer"), infer_option_problems, _complete)


def main(argv: Sequence[str]) -> int:
    """The command; returns the exit code, or raises a UserError."""
    take_cluster_variables(os.environ)
    return COMMAND.run(argv, lambda cfg: _main(cfg, argv))


def _main(cfg: InferConfig, words: Sequence[str]) -> int:
    launch = requested_launch(cfg.launch, os.environ)
    if cfg.backend.infer_backend == "transformers":
        from megaswift.inference.prechecks import locate_pooling_model

        if (pooling := locate_pooling_model(cfg)) is not None:
            return _pooling(cfg, *pooling, several=launch is not None or is_launched_worker(os.environ))
    if launch is not None:
        from megaswift.inference.prechecks import precheck_model

        precheck_model(cfg)
        code = run_in_processes(launch, words, os.environ)
        if code > 128:
            log.info(STOPPED)
        return code
    try:
        return _run(cfg)
    except KeyboardInterrupt:
        if CHECKED not in os.environ:  # else the process that started this one says so
            log.info(STOPPED if cfg.file.dataset else "stopped")
        return 128 + signal.SIGINT


def _run(cfg: InferConfig) -> int:
    from megaswift.inference.prechecks import precheck_model

    precheck_model(cfg)  # before what follows imports torch
    _start_process_group(bool(cfg.file.dataset), cfg.launch.ddp_timeout)
    from megaswift.inference.chat_inputs import ChatInputRenderer
    from megaswift.inference.generator import generation_params
    from megaswift.inference.model import load_config_tokenizer_and_processor
    from megaswift.serve.terminal import Terminal

    talk = cfg.conversation
    prepared = load_config_tokenizer_and_processor(cfg.weights, talk.chat_template, talk.max_length)
    sampling = generation_params(cfg.generation, prepared.generation)
    if cfg.file.dataset:
        log.print_result(f"wrote {_answer_files(cfg, prepared, sampling)}")
        return 0
    from megaswift.data.vision.placeholders import RowImageFolders

    prompts = ChatInputRenderer(prepared, cfg.conversation, RowImageFolders(Path.cwd()))
    prompts.need_template()
    generator = _loader(cfg, prepared)()
    generation = cfg.generation
    Terminal(generator, prompts, sampling, generation.max_new_tokens, generation.stop, cfg.terminal.stream).run()
    return 0


def _pooling(cfg: InferConfig, folder: Path, found: PoolingFolder, several: bool) -> int:
    """Vectors, scores or classes of the rows of a file, or of lines of text."""
    from megaswift.inference.pooling.folder import SEQUENCE, TOKENS

    if not cfg.file.dataset and found.kind not in (SEQUENCE, TOKENS):
        rule = f"gives no text ({found.kind}): it reads rows of files"
        raise ConfigError(Problem(f"--model {cfg.weights.model}", rule, "--dataset FILE.jsonl"))
    if several:
        rule = "are not supported for embeddings, scores and classes"
        raise ConfigError(Problem("several processes", rule, "start one, on a part of the rows each: FILE#N"))
    from megaswift.data.model_tokenizer import read_tokenizer
    from megaswift.data.templates.chosen import read_system_message
    from megaswift.inference.pooling.model import load_pooling_model
    from megaswift.inference.pooling.texts import TextReader, context_of
    from megaswift.serve.pooling.file import TextTerminal, read_rows, write_results

    tokenizer = read_tokenizer(folder, cfg.weights.trust_remote_code, None)
    system = read_system_message(cfg.conversation.system) or ""
    reader = TextReader(tokenizer, found, context_of(folder), cfg.conversation.max_length, system)

    def load() -> PoolingModel:
        return load_pooling_model(folder, cfg.weights, cfg.placement, cfg.pooling, found)

    if not cfg.file.dataset:
        TextTerminal(load(), reader, cfg.pooling).run()
        return 0
    rows = read_rows(cfg.file, reader, cfg.pooling, _rows_of_run(cfg))
    log.print_result(f"wrote {write_results(rows, load, tokenizer, cfg.file)}")
    return 0


def requested_launch(options: InferProcessOptions, environ: Mapping[str, str]) -> LaunchConfig | None:
    """The processes to start; None where this process answers all rows, or its share because a launcher has started
    it."""
    several = (options.nproc_per_node or 1) > 1 or (options.nnodes or 1) > 1
    if is_launched_worker(environ) or not several:
        return None
    return LaunchConfig(**{name: getattr(options, name) for name in LAUNCH_OPTIONS})


def run_in_processes(launch: LaunchConfig, words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Runs `megaswift infer WORDS` in this node's processes to the end; the exit code."""
    if taken := torchrun_launcher.port_in_use_problems(launch):
        raise ConfigError(taken)
    command = torchrun_launcher.torchrun_command(launch, Path(__file__), words)
    environment = torchrun_launcher.torchrun_environment(launch, {**environ, CHECKED: "1"})
    return torchrun_launcher.run_torchrun_with_restarts(command, environment)


def share_of_devices(visible: Sequence[str], rank: int, processes: int) -> list[str]:
    """The devices of a process: neighbours, as many for each as there are; ConfigError where there are too few."""
    if len(visible) < processes:
        raise ConfigError(
            Problem(
                f"{processes} processes",
                f"have {len(visible)} GPUs between them; each needs at least one",
                f"NPROC_PER_NODE={len(visible)}",
            )
        )
    each = len(visible) // processes
    return list(visible[rank * each : (rank + 1) * each])


def take_share_of_devices(device_count: int) -> None:
    """Leaves only this process's share of the machine's GPUs visible; before CUDA is started."""
    if not is_launched_worker(os.environ) or not device_count:
        return
    named = os.environ.get(DEVICES, "")
    visible = named.split(",") if named else [str(number) for number in range(device_count)]
    rank = int(os.environ["LOCAL_RANK"])
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", "1")))
    os.environ[DEVICES] = ",".join(share_of_devices(visible, rank, processes))


class StoppedProcessError(UserError):
    """Another process has stopped without ending."""

    title = "inference was stopped"
    exit_code = 1


def _start_process_group(has_rows: bool, timeout: int) -> None:
    """Where a launcher has started several processes: their group, and this one's share of the GPUs."""
    if not is_launched_worker(os.environ):
        return
    if not has_rows and os.environ["WORLD_SIZE"] != "1":
        rule = f"started {os.environ['WORLD_SIZE']} processes; a conversation in the terminal has one"
        raise ConfigError(Problem("the launcher", rule, "--dataset FILE.jsonl, or start megaswift infer directly"))
    import torch

    from megaswift.engine.process_group import init_default_and_gloo_process_groups

    take_share_of_devices(torch.cuda.device_count())
    init_default_and_gloo_process_groups("gloo", timeout)
    if int(os.environ["WORLD_SIZE"]) > 1:
        threading.Thread(target=_watch_progress, args=(timeout,), name="progress", daemon=True).start()


def _watch_progress(timeout: int) -> None:
    """Publishes this process's progress, and ends it where a process that it waits for makes none."""
    from megaswift.run.faults.blocking_ranks import RankStateStore
    from megaswift.trainers.hooks.rank_progress import ProgressWatch

    states = RankStateStore()
    watch = ProgressWatch(states, timeout)
    while not (stopped := watch.look(time.monotonic())):
        time.sleep(LOOK_SECONDS)
    rule = f"has neither computed nor written anything for {timeout} s (--ddp_timeout)"
    error = StoppedProcessError([Problem(f"process {r} on {states.host_of(r)}", rule, STOPPED) for r in stopped])
    error.rank0_may_print = 0 not in stopped
    exit_worker(print_error_once(error, os.environ), os.environ)


def _answer_files(cfg: InferConfig, prepared: ModelConfigAndTokenizer, sampling: Any) -> Path:
    from megaswift.data.vision.placeholders import RowImageFolders
    from megaswift.inference.chat_inputs import ChatInputRenderer
    from megaswift.serve.prompt_file import PromptFileRun, answer_journal_with_run_fingerprint
    from megaswift.serve.prompt_rows import PromptRows, read_prompt_file

    renderers: dict[Path, ChatInputRenderer] = {}

    def renderer(file: Path) -> ChatInputRenderer:
        """Images are relative to the folder of their data file."""
        home = file.parent
        if home not in renderers:
            renderers[home] = ChatInputRenderer(prepared, cfg.conversation, RowImageFolders(home))
        return renderers[home]

    rows = read_prompt_file(PromptRows(cfg.file.dataset, cfg.file.columns, _rows_of_run(cfg)), renderer)
    journal = answer_journal_with_run_fingerprint(cfg, Path(prepared.folder))
    run = PromptFileRun(cfg, rows, journal, sampling, renderer(Path(cfg.file.dataset[0])))
    return run.run(_loader(cfg, prepared))


def _rows_of_run(cfg: InferConfig) -> frozenset[str] | None:
    """--load_data_args: the rows that the run has held out; None: all rows of the data set."""
    source = run_config_file([*cfg.weights.adapter_folders, cfg.weights.model]) if cfg.file.load_data_args else None
    if source is None:
        return None
    from megaswift.data.model_tokenizer import tokenizer_or_processor_for
    from megaswift.data.sources.held_out import validation_row_places

    run = load_run_config(source)
    if cfg.file.dataset not in (run.data.val_dataset, run.data.dataset):  # --dataset on the command line
        return None
    if run.task in RETRIEVAL and not run.data.val_dataset:
        rule = f"does not know the rows that a run of {run.task} held out"
        raise ConfigError(Problem("--load_data_args true", rule, "--dataset FILE.jsonl"))
    reader = tokenizer_or_processor_for(run.model, run.data, run.task)
    return validation_row_places(run.data, run.train, reader, run.task, run.rollout.max_completion_length)


def _loader(cfg: InferConfig, prepared: ModelConfigAndTokenizer) -> Callable[[], Any]:
    """What loads the model of a backend."""

    def transformers() -> Any:
        from megaswift.inference.generator import Generator
        from megaswift.inference.model import load_model_and_prompt_device

        model, device = load_model_and_prompt_device(prepared, cfg.placement)
        return Generator(model, prepared.tokenizer, device)

    if cfg.backend.infer_backend == "transformers":
        return transformers
    from megaswift.inference.vllm_generator import VllmGenerator
    from megaswift.rollout.vllm_package import max_lora_rank_for
    from megaswift.serve.vllm_server import adapters_rank, infer_problems

    if problems := infer_problems(cfg.weights):
        raise ConfigError(problems)
    rank = adapters_rank(cfg.weights)
    return lambda: VllmGenerator(prepared, cfg.backend, max_lora_rank_for(rank) if rank else 0)


def worker_main(words: Sequence[str]) -> NoReturn:
    """A process of several: the exit code, with one message for a user's mistake."""
    if {PARENT, "TORCHELASTIC_RUN_ID"} & os.environ.keys():
        end_with_parent(os.environ)
    try:
        code = main(words)
    except UserError as error:
        code = print_error_once(error, os.environ)
    except OSError as error:
        if (refused := storage_error(error)) is None:
            raise
        code = print_error_once(refused, os.environ)
    exit_worker(code, os.environ)


if __name__ == "__main__":
    worker_main(sys.argv[1:])
