"""`megaswift sample`: completions of prompts, scored with rewards; the best, or pairs, as a data set."""

from __future__ import annotations

import hashlib
import json
import signal
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaswift import log
from megaswift.compat.inference import InferenceToolkits
from megaswift.data.templates.chosen import check_template, read_system_message
from megaswift.errors import ConfigError, DataError
from megaswift.folders.source import locate_model, with_fetched_adapters
from megaswift.inference.openai_server import first_served_model
from megaswift.inference.options.commands import GenerationOptions, ModelLoadingOptions
from megaswift.inference.options.parser import CommandParser, ParsedCommand
from megaswift.inference.prechecks import locate_generation_model
from megaswift.rejection.options.checks import (
    complete_sample_options,
    partial_file,
    sample_option_problems,
    sample_server_token,
)
from megaswift.rejection.options.sampling import SampleConfig, SampleRewardOptions

if TYPE_CHECKING:
    from megaswift.inference.chat_inputs import ChatInputRenderer
    from megaswift.rejection.journal import SampledCompletion
    from megaswift.rejection.prompts import PromptToSample
    from megaswift.rewards.scoring import RewardFunction

USAGE = """\
megaswift sample: completions of prompts, the best of them as a data set

  megaswift sample --model DIR --dataset p.jsonl --reward_funcs accuracy         the best of 8
  megaswift sample --model DIR --dataset p.jsonl --reward_model RM --num_best 2
  megaswift sample --model DIR --dataset p.jsonl --reward_funcs accuracy --output_format preference"""
STOPPED = "stopped; the same command goes on"


def _complete(parsed: ParsedCommand) -> ParsedCommand:
    return complete_sample_options(with_fetched_adapters(parsed, "weights"))


COMMAND = CommandParser("sample", USAGE, SampleConfig, InferenceToolkits("sample"), sample_option_problems, _complete)


def main(argv: Sequence[str]) -> int:
    """The command; returns the exit code, or raises a UserError."""
    try:
        return COMMAND.run(argv, _main)
    except KeyboardInterrupt:
        log.info(STOPPED)
        return 128 + signal.SIGINT


def _main(cfg: SampleConfig) -> int:
    # What can be wrong without torch: the model's folder, the prompt's texts, the server.
    remote = cfg.remote.base_url is not None
    folder = locate_model(cfg.weights, weights=False) if remote else locate_generation_model(cfg.weights)
    if cfg.conversation.chat_template is not None:
        check_template(cfg.conversation.chat_template)
    read_system_message(cfg.conversation.system)

    # Prompts and rewards, before weights are read.
    from megaswift.inference.chat_inputs import ChatInputRenderer
    from megaswift.inference.model import load_config_tokenizer_and_processor
    from megaswift.rejection.journal import SampleJournal
    from megaswift.rejection.prompts import read_prompts
    from megaswift.rejection.run import SampleRun
    from megaswift.rewards.scoring import missing_reward_column_problems
    from megaswift.serve.prompt_rows import prompt_dataset_files

    prepared = load_config_tokenizer_and_processor(cfg.weights, cfg.conversation.chat_template)
    renderer = ChatInputRenderer(prepared, cfg.conversation)
    functions = reward_functions(cfg.rewards, cfg.completions.max_new_tokens, cfg.weights)
    sources = prompt_dataset_files(cfg.data.dataset)
    prompts = read_prompts(sources, cfg.data.columns, renderer)
    if lacking := missing_reward_column_problems(functions, frozenset(prompts[0].columns)):
        raise DataError(lacking)
    result = Path(str(cfg.data.result_path))
    digest = hashlib.sha256()
    for source in sources:
        digest.update(f"{source.rows} ".encode())
        for path in source.files:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    journal = SampleJournal(partial_file(str(result)), _identity(cfg, folder, digest.hexdigest()))
    weights = [*cfg.rewards.reward_weights] or [1.0] * len(functions)
    run = SampleRun(prompts, journal, cfg.completions, cfg.selection, functions, weights, result)
    summary = run.run(lambda: _server(cfg, prepared.tokenizer) if remote else _local(cfg, prepared, renderer))
    _print_summary(summary)
    log.print_result(f"wrote {log.count_text(summary['rows'], 'row')} to {result}")
    return 0


def reward_functions(options: SampleRewardOptions, longest: int, loading: ModelLoadingOptions) -> list[RewardFunction]:
    """Load the reward functions and models in the order of their weights; ConfigError with all that is wrong."""
    from megaswift.rewards.functions import load_reward_functions
    from megaswift.rewards.scoring import BuiltInRewardParameters

    names = [f.name for f in fields(BuiltInRewardParameters) if f.name != "max_completion_length"]
    parameters = BuiltInRewardParameters(longest, **{name: getattr(options, name) for name in names})
    functions = load_reward_functions(options.reward_funcs, parameters, options.external_plugins)
    if not options.reward_model:
        return functions
    from megaswift.rewards.reward_model import load_reward_models

    how = ModelLoadingOptions(trust_remote_code=loading.trust_remote_code)
    return [*functions, *load_reward_models(options.reward_model, how, {f.name for f in functions})]


def _identity(cfg: SampleConfig, folder: Path, data: str) -> dict[str, Any]:
    """What must be equal to go on with a run: all that changes completions and rewards; the selection may change."""
    newest = max((p.stat().st_mtime_ns for p in folder.iterdir() if p.is_file()), default=0)
    run = {
        "model": [str(folder.resolve()), newest],
        "adapters": list(cfg.weights.adapters),
        "base_url": cfg.remote.base_url,
        "served_model_name": cfg.remote.served_model_name,
        "backend": cfg.backend.infer_backend,
        "torch_dtype": cfg.weights.torch_dtype,
        "quantization_bit": cfg.placement.quantization_bit,
        "dataset": data,
        "columns": cfg.data.columns,
        "completions": asdict(cfg.completions),
        "conversation": asdict(cfg.conversation),
        "rewards": asdict(cfg.rewards),
    }
    return dict(json.loads(json.dumps(run)))


Sampler = Callable[[Sequence[tuple[Any, int]], int], list[Any]]


def _local(cfg: SampleConfig, prepared: Any, renderer: ChatInputRenderer) -> Sampler:
    """The model in this process."""
    from megaswift.inference.generator import generation_params

    options = cfg.completions
    chosen = GenerationOptions(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        repetition_penalty=options.repetition_penalty,
        num_beams=1,
    )
    generator = _generator(cfg, prepared)

    def sample(batch: Sequence[tuple[PromptToSample, int]], seed: int) -> list[SampledCompletion]:
        from megaswift.rejection.journal import SampledCompletion

        requests = [renderer.request(p.tokens, options.max_new_tokens, options.stop) for p, _ in batch]
        answers = generator.generate(requests, generation_params(chosen, _Plain(), seed))
        return [SampledCompletion(one.text, one.token_ids, one.reason == "stop") for one in answers]

    return sample


class _Plain:
    """A generation configuration that sets nothing: completions are sampled as the options say."""

    do_sample = True
    temperature = 1.0


def _generator(cfg: SampleConfig, prepared: Any) -> Any:
    """The loaded model of a backend."""
    if cfg.backend.infer_backend == "transformers":
        from megaswift.inference.generator import Generator
        from megaswift.inference.model import load_model_and_prompt_device

        model, device = load_model_and_prompt_device(prepared, cfg.placement)
        return Generator(model, prepared.tokenizer, device)
    from megaswift.inference.vllm_generator import VllmGenerator
    from megaswift.rollout.vllm_package import max_lora_rank_for
    from megaswift.serve.vllm_server import adapters_rank, infer_problems

    if problems := infer_problems(cfg.weights):
        raise ConfigError(problems)
    rank = adapters_rank(cfg.weights)
    return VllmGenerator(prepared, cfg.backend, max_lora_rank_for(rank) if rank else 0)


def _server(cfg: SampleConfig, tokenizer: Any) -> Sampler:
    """The model behind --base_url."""
    from megaswift.rejection.server import ServerAnswers

    token = sample_server_token(cfg.remote)
    address = str(cfg.remote.base_url).rstrip("/")
    name = cfg.remote.served_model_name or first_served_model(address, token)
    return ServerAnswers(address, name, token, cfg.completions, tokenizer)


def _print_summary(summary: dict[str, Any]) -> None:
    """Print the figures of a run."""
    print(f"{summary['prompts']:,} prompts, {summary['completions']:,} completions, {summary['truncated']:,} cut off")
    if summary.get("mean_reward") is not None:
        print(f"mean reward {summary['mean_reward']:.4g}")
    for k, figures in summary.get("pass@k", {}).items():
        print(f"pass@{k}  {figures['value']:.4g}  ({figures['low']:.4g} to {figures['high']:.4g})")
    if summary.get("left_out_as_easy"):
        print(f"{summary['left_out_as_easy']:,} prompts left out: too large a share of their completions passes")
