"""Options of `infer`, `deploy` and `export`, and which command has which. Names are Hugging Face's; others are
spellings of them."""

from __future__ import annotations

from dataclasses import dataclass

from megaswift.config.model import DTYPES
from megaswift.config.option import option

COLD = 1e-5
"""The lowest temperature at which tokens are drawn, as in vLLM: scores divided by less overflow."""
PENALTIES = (0.01, 100.0)
"""Repetition penalties between which scores stay finite."""
ATTENTION = {
    "flash": "flash_attention_2",
    "flash_attn": "flash_attention_2",
    "flex": "flex_attention",
    "unfused": "eager",
}


@dataclass(frozen=True)
class SourceOptions:
    """Model"""

    model: str | None = option(
        None,
        "Hugging Face folder, OUT of a run, a checkpoint, or a hub id",
        aliases=("model_id_or_path", "model_name_or_path"),
        metavar="DIR",
    )
    use_hf: bool = option(True, "A hub id of the model is Hugging Face's; false: ModelScope's")
    model_revision: str | None = option(None, "Branch, tag or commit of a hub id", metavar="REV")
    trust_remote_code: bool = option(False, "Run Python code that comes with the model's folder")
    adapters: str | None = option(
        None, "PEFT folder of adapters on the model: OUT/adapter", aliases=("adapter",), metavar="DIR"
    )


@dataclass(frozen=True)
class WeightsOptions(SourceOptions):
    """Model"""

    torch_dtype: str = option(
        "auto",
        "Precision of the weights; auto: the checkpoint's",
        aliases=("dtype", "model_dtype"),
        choices=("auto", "float32", "bfloat16", "float16"),
        spellings=DTYPES,
    )
    attn_impl: str = option(
        "auto",
        "Attention of transformers; auto: its choice for the model",
        aliases=("attn_implementation",),
        choices=("auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"),
        spellings=ATTENTION,
    )
    merge_adapters: bool = option(
        False, "Add the adapters to the weights once, instead of computing them beside in every step"
    )


@dataclass(frozen=True)
class PlacementOptions:
    """Devices

    The device map is printed before anything is loaded. Devices that --max_memory does not name are not used."""

    device_map: str = option(
        "auto",
        (
            "auto, balanced, balanced_low_0, sequential, a device (cpu, cuda:0), or a JSON file of module names and "
            "devices"
        ),
    )
    max_memory: str | None = option(None, "Most memory for weights on each device: 0:20GiB,cpu:64GiB", metavar="SIZES")
    offload_folder: str | None = option(
        None,
        "Folder for weights that fit on no device: they are read from disk in every step",
        aliases=("offload_dir",),
        metavar="DIR",
    )
    quantization_bit: int | None = option(
        None,
        "Weights of linear layers in 4 (NF4) or 8 bits, by bitsandbytes",
        aliases=("quant_bits",),
        minimum=4,
        maximum=8,
        metavar="BITS",
    )


@dataclass(frozen=True)
class GenerationOptions:
    """Generation

    What is not set comes from the model's generation_config.json."""

    max_new_tokens: int = option(512, "Longest answer", aliases=("max_tokens",), minimum=1, unit="tokens")
    temperature: float | None = option(
        None, "Above 0: tokens are drawn; 0: the likeliest is taken", minimum=0, metavar="T"
    )
    top_p: float | None = option(
        None, "Draw from the likeliest tokens of together this probability", above=0, maximum=1, metavar="P"
    )
    top_k: int | None = option(None, "Draw from this many of the likeliest tokens; 0: from all", minimum=0, metavar="K")
    repetition_penalty: float | None = option(
        None,
        "Above 1: tokens that are there already become less likely",
        minimum=PENALTIES[0],
        maximum=PENALTIES[1],
        metavar="X",
    )
    num_beams: int | None = option(None, "Width of a beam search", minimum=1, metavar="N")
    stop: tuple[str, ...] = option(
        (),
        "Texts that end an answer; they are not part of it",
        aliases=("stop_strings", "stop_words"),
        metavar="TEXT...",
    )
    seed: int | None = option(
        None, "Seed of what is drawn; unset: another each time (a file of prompts: 42)", minimum=0, metavar="SEED"
    )


@dataclass(frozen=True)
class ConversationOptions:
    """Conversation"""

    chat_template: str | None = option(None, "Jinja file or text in place of the tokenizer's template", metavar="FILE")
    system: str | None = option(
        None, "System message where the conversation brings none: text, or a file that holds it", metavar="TEXT|FILE"
    )


@dataclass(frozen=True)
class FileOptions:
    """A file of prompts, instead of a conversation in the terminal"""

    dataset: str | None = option(
        None,
        "Rows of any format that training reads (.jsonl, .json, .csv, .parquet); answers need not be there",
        aliases=("val_dataset", "infer_dataset"),
        metavar="FILE",
    )
    columns: dict[str, str] = option({}, "File's columns to ours: question=query, or JSON", metavar="FROM=TO...")
    result_path: str | None = option(
        None, "JSONL file to make: each row with its `response`, in the input's order", metavar="FILE"
    )
    per_device_eval_batch_size: int = option(
        8,
        "Prompts of similar length that are answered together",
        aliases=("max_batch_size", "batch_size"),
        minimum=1,
        unit="rows",
    )
    logprobs: bool = option(False, "Also write the log-probability of each token of the answer")
    top_logprobs: int | None = option(
        None, "And those of this many likeliest tokens at each position", minimum=1, maximum=20, metavar="N"
    )


@dataclass(frozen=True)
class ServerOptions:
    """Server"""

    host: str = option("127.0.0.1", "Address to listen on; any but loopback needs a token")
    port: int = option(8000, "Port; 0: any free one", minimum=0, maximum=65535)
    api_key: str | None = option(
        None, "Token that clients send; better in the environment: MEGASWIFT_API_KEY", metavar="TOKEN"
    )
    served_model_name: str | None = option(None, "The model's name for clients; unset: its folder's", metavar="NAME")
    infer_backend: str = option(
        "transformers", "What runs the model", choices=("transformers", "vllm"), spellings={"pt": "transformers"}
    )
    max_batch_size: int = option(8, "Answers that are generated together", minimum=1, unit="answers")
    max_waiting: int = option(64, "Answers that may wait; further requests get status 429", minimum=0, unit="answers")
    max_body_size: str | None = option(
        None, "Largest request; unset: 8MiB, or 32MiB where the model reads images", metavar="SIZE"
    )
    log_requests: bool = option(True, "Log a line for each request: client, path, status, seconds; no text, no token")
    tensor_parallel_size: int | None = option(
        None, "GPUs over which vLLM splits the model", aliases=("tp",), minimum=1, unit="GPUs"
    )


@dataclass(frozen=True)
class ExportOptions:
    """Export"""

    merge_lora: bool = option(False, "Merge the adapters of --adapters into the model")
    quantization_bit: int | None = option(
        None,
        "Save linear layers in 4 (NF4) or 8 bits, by bitsandbytes",
        aliases=("quant_bits", "quant"),
        minimum=4,
        maximum=8,
        metavar="BITS",
    )
    output_dir: str | None = option(None, "The folder to make; it must not exist", metavar="DIR")
    max_shard_size: str = option("5GB", "Largest file")


@dataclass(frozen=True)
class AnswerConfig:
    """What every command has whose model answers."""

    weights: WeightsOptions
    placement: PlacementOptions
    generation: GenerationOptions
    conversation: ConversationOptions


@dataclass(frozen=True)
class InferConfig(AnswerConfig):
    """One `megaswift infer`, checked."""

    file: FileOptions


@dataclass(frozen=True)
class DeployConfig(AnswerConfig):
    """One `megaswift deploy`, checked."""

    server: ServerOptions


@dataclass(frozen=True)
class ExportConfig:
    """One `megaswift export`, checked."""

    source: SourceOptions
    export: ExportOptions
