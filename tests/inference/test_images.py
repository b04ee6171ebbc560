"""Questions about images: answers of files, of the server and in the terminal are transformers' own on its processor's
inputs.

Covers: megaswift/inference/chat_inputs.py, megaswift/inference/prechecks.py.
"""

from __future__ import annotations

import base64
import copy
import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForImageTextToText

from megaswift.data.vision import files
from megaswift.data.vision.placeholders import RowImageFolders
from megaswift.data.vision.processor import Processor
from megaswift.errors import DataError
from megaswift.infer import main
from megaswift.inference.chat_inputs import ChatInputError, ChatInputRenderer
from megaswift.inference.generator import GenerationParams, Generator
from megaswift.inference.model import ModelConfigAndTokenizer
from megaswift.inference.options.commands import ChatTemplateOptions, GenerationOptions
from megaswift.serve.app import ServerState, build_app
from megaswift.serve.request_queue import RequestQueue
from megaswift.serve.terminal import Terminal
from tests.inference.models import opened
from tests.parity import vision

pytestmark = pytest.mark.wide

NEW, CHEAP, END = 8, "qwen2_vl", vision.VOCAB.index("<unk>")
Opened = tuple[Path, ModelConfigAndTokenizer, Generator]


def ask(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [vision.part(p) if isinstance(p, str) else p for p in parts]}]


def shown(number: int) -> dict[str, str]:
    return vision.image(f"{number}.png")


CONVERSATIONS = [
    ask(shown(0), "what is it?"),
    ask(shown(1), "what is it?"),
    ask("a ", shown(2), " and a longer question, b ", shown(0), "?"),
    ask("no image at all?"),
    [*ask(shown(3), "ab"), {"role": "assistant", "content": [vision.part("cd")]}, *ask("and ", shown(1))],
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Opened]:
    """By kind: its folder, and it as `infer` opens it."""
    root = tmp_path_factory.mktemp("images")
    vision.write_images(root / "images")
    kept: dict[str, Opened] = {}

    def make(kind: str) -> Opened:
        if kind not in kept:
            folder = vision.write_model(kind, root / kind)
            weights = AutoModelForImageTextToText.from_pretrained(folder)
            with torch.no_grad():
                for p in weights.parameters():
                    p.mul_(4 if p.dim() > 1 else 1)  # answers that vary
            weights.generation_config.eos_token_id = END  # and do not end at once
            weights.save_pretrained(folder)
            kept[kind] = folder, *opened(folder)
        return kept[kind]

    return make


def told(
    folder: Path, conversation: list[dict[str, Any]], prepared: ModelConfigAndTokenizer, model: Any = None
) -> tuple[str, list[float]]:
    """transformers alone: its answer, and the log-probability of each token."""
    assert isinstance(prepared.reader, Processor)
    processor, asked = prepared.reader.inner, copy.deepcopy(conversation)
    for part in [p for m in asked for p in m["content"] if "path" in p]:
        part["path"] = str(folder.parent / part["path"])
    made = processor.apply_chat_template(
        asked, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    if "pixel_values" not in made:
        made = {k: made[k] for k in ("input_ids", "attention_mask")}
    out = (model or AutoModelForImageTextToText.from_pretrained(folder)).generate(
        **made, max_new_tokens=NEW, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    ids = out.sequences[0, made["input_ids"].shape[1] :]
    scores = [
        float(step[0].log_softmax(-1)[token]) for step, token in zip(out.logits, ids, strict=True) if token != END
    ]
    return prepared.tokenizer.decode(ids, skip_special_tokens=True), scores


def theirs(folder: Path, conversation: list[dict[str, Any]], prepared: ModelConfigAndTokenizer) -> str:
    return told(folder, conversation, prepared)[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [CHEAP, "llava"])
@pytest.mark.parametrize("how", ["adapters", "disk"])
def test_with_adapters_and_with_weights_on_disk(
    kind: str, how: str, model: Callable[[str], Opened], tmp_path: Path
) -> None:
    folder, prepared, _ = model(kind)
    weights, adapter = AutoModelForImageTextToText.from_pretrained(folder), None
    if how == "adapters":
        torch.manual_seed(1)
        config = peft.LoraConfig(
            r=4, lora_alpha=16, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"
        )
        weights, adapter = peft.get_peft_model(weights, config), tmp_path / "adapter"
        weights.save_pretrained(adapter)
    room = {"max_memory": "cpu:90KiB", "offload_folder": str(tmp_path / "off")} if how == "disk" else {}
    _, generator = opened(folder, adapter, **room)
    assert any(p.is_meta for p in generator.model.parameters()) == (how == "disk")
    prompts = ChatInputRenderer(prepared, ChatTemplateOptions(), RowImageFolders(folder.parent))
    found = generator.generate(
        [prompts.request(prompts.of_chat(c), NEW, (), logprobs=0) for c in CONVERSATIONS], GenerationParams()
    )
    want, scores = zip(*(told(folder, c, prepared, weights) for c in CONVERSATIONS), strict=True)
    assert [c.text for c in found] == [*want] and generator._tried[True]
    assert [[t.logprob for t in c.logprobs] for c in found] == [pytest.approx(s, abs=2e-5) for s in scores]
    assert (how == "disk") == ([*want] == [theirs(folder, c, prepared) for c in CONVERSATIONS])


def url(folder: Path, number: int) -> str:
    return (
        "data:image/png;base64," + base64.b64encode((folder.parent / "images" / f"{number}.png").read_bytes()).decode()
    )


@pytest.mark.parametrize(
    "kind", [CHEAP, *(pytest.param(k, marks=pytest.mark.slow) for k in vision.KINDS if k != CHEAP)]
)
def test_a_batch_with_and_without_images(kind: str, model: Callable[[str], Opened]) -> None:
    folder, prepared, generator = model(kind)
    prompts = ChatInputRenderer(prepared, ChatTemplateOptions(), RowImageFolders(folder.parent))
    want, scores = zip(*(told(folder, c, prepared) for c in CONVERSATIONS), strict=True)
    found = generator.generate(
        [prompts.request(prompts.of_chat(c), NEW, (), logprobs=0) for c in CONVERSATIONS], GenerationParams()
    )
    assert [c.text for c in found] == [*want] and want[0] != want[1] and len(set(want)) > 2
    assert [[t.logprob for t in c.logprobs] for c in found] == [pytest.approx(s, abs=2e-5) for s in scores]
    assert generator._tried[True], "they go in one batch"
    # nothing of the images is left
    again = generator.generate([prompts.request(prompts.of_chat(CONVERSATIONS[3]), NEW, ())], GenerationParams())
    assert again[0].text == want[3]


@pytest.mark.parametrize("kind", [CHEAP, pytest.param("gemma3", marks=pytest.mark.slow)])
def test_a_file_of_rows(
    kind: str, model: Callable[[str], Opened], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the forms in which training reads them, by paths and in the file."""
    folder, prepared, _ = model(kind)
    rows = [
        {"id": 0, "messages": CONVERSATIONS[0]},
        {"query": "<image>what is it?", "images": ["images/1.png"]},
        {"messages": ask({"type": "image_url", "image_url": {"url": url(folder, 0)}}, "what is it?")},
        {"messages": [*ask("no image at all?"), {"role": "assistant", "content": [vision.part("b")]}]},
        {"messages": [{"role": "user", "content": "what is it?"}], "images": [str(folder.parent / "images" / "1.png")]},
    ]
    data = folder.parent / "rows.jsonl"
    data.write_text("".join(json.dumps(r) + "\n" for r in rows))
    looked: list[Any] = []
    monkeypatch.setattr(
        "megaswift.data.vision.processor.open_image",
        lambda image, sent: looked.append(sent) or files.open_image(image),
    )
    words = ["--model", str(folder), "--dataset", str(data), "--max_new_tokens", str(NEW), "--batch_size", "3"]
    assert main([*words, "--result_path", str(tmp_path / "a.jsonl")]) == 0
    found = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    want = [theirs(folder, CONVERSATIONS[i], prepared) for i in (0, 1, 0, 3, 1)]
    assert [r["response"] for r in found] == want and found[3]["labels"] == "b" and found[0]["id"] == 0
    assert looked == [False] * 8, "each of four images is opened when its row is read, and again when its turn comes"


def test_an_image_that_went_before_its_turn_is_told(model: Callable[[str], Opened], tmp_path: Path) -> None:
    folder, prepared, _ = model(CHEAP)
    prompts = ChatInputRenderer(prepared, ChatTemplateOptions(), RowImageFolders(tmp_path))
    image = vision.write_images(tmp_path)[0]
    prompt = prompts.of_chat(ask({"type": "image", "image": image}, "x"))
    kept = type(prompt)(prompt.ids, prompt.text, prompt.media)
    assert prompts.request(kept, NEW, ()).pictures is not None
    (folder.parent / "images" / "2.png").rename(tmp_path / image)
    with pytest.raises(ChatInputError, match="its images changed size"):
        prompts.request(kept, NEW, ())
    (tmp_path / image).unlink()
    with pytest.raises(ChatInputError, match="cannot be read"):
        prompts.request(kept, NEW, ())


def test_rows_that_cannot_be_asked(model: Callable[[str], Opened], tmp_path: Path) -> None:
    folder, _, _ = model(CHEAP)
    (tmp_path / "broken.png").write_bytes(b"no image")
    rows = [
        ask({"type": "image", "path": "9.png"}),
        ask({"type": "image", "url": "http://host/a.png"}),
        ask({"type": "image", "path": "broken.png"}),
        ask({"type": "audio", "audio": "a.wav"}),
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text(
        "".join(json.dumps({"messages": r}) + "\n" for r in rows) + '{"text": "a", "images": ["broken.png"]}\n'
    )
    with pytest.raises(DataError) as caught:
        main(["--model", str(folder), "--dataset", str(data), "--result_path", str(tmp_path / "a.jsonl")])
    for part in (
        "rows.jsonl:1: images: no such file",
        "rows.jsonl:2: images: http://host/a.png: URLs are not downloaded",
        "rows.jsonl:3: images: ",
        "unknown format",
        "rows.jsonl:4: messages[0].content: a part of type 'audio'",
        "rows.jsonl:5: images are not supported: a plain text is continued without",
    ):
        assert part in str(caught.value), caught.value


class Clients:
    """The server's application, asked by the openai client in this process."""

    def __init__(self, prepared: ModelConfigAndTokenizer, generator: Generator) -> None:
        import openai
        from starlette.testclient import TestClient

        line = RequestQueue.before(generator, 4, 8)
        named = (
            "sees",
            ChatInputRenderer(prepared, ChatTemplateOptions()),
            line,
            GenerationOptions(),
            prepared.generation,
            int(time.time()),
        )
        served = ServerState(*named, copy.deepcopy(prepared.tokenizer))
        http = TestClient(build_app(served))
        self.client = openai.OpenAI(base_url="http://testserver/v1", api_key="x", max_retries=0, http_client=http)
        self.served = served

    def chat(self, *parts: Any, **how: Any) -> Any:
        return self.client.chat.completions.create(model="sees", messages=ask(*parts), max_tokens=NEW, **how)

    def refused(self, *parts: Any) -> str:
        import openai

        with pytest.raises(openai.BadRequestError) as caught:
            self.chat(*parts)
        return str(caught.value.body["message"])


def sent(address: str, **more: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": address, **more}}


@pytest.fixture(scope="module")
def clients(model: Callable[[str], Opened]) -> Any:
    made = Clients(*model(CHEAP)[1:])
    yield made
    made.served.line.close()


def test_the_server_answers_about_images(clients: Clients, model: Callable[[str], Opened]) -> None:
    folder, prepared, _ = model(CHEAP)
    want = theirs(folder, CONVERSATIONS[0], prepared)
    whole = clients.chat(sent(url(folder, 0), detail="auto"), "what is it?", n=2)
    assert [c.message.content for c in whole.choices] == [want, want]
    assert whole.usage.prompt_tokens == len(
        ChatInputRenderer(prepared, ChatTemplateOptions(), RowImageFolders(folder.parent)).of_chat(CONVERSATIONS[0]).ids
    )
    chunks = clients.chat(sent(url(folder, 0)), "what is it?", stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == want
    assert clients.chat("no image at all?").choices[0].message.content == theirs(folder, CONVERSATIONS[3], prepared)


def test_the_server_reads_what_it_was_sent_and_nothing_else(
    clients: Clients, model: Callable[[str], Opened], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file of its machine, no address; no format that Pillow hands to other programs, no image that fills the
    memory."""
    from PIL import Image

    folder = model(CHEAP)[0]
    local = str(folder.parent / "images" / "0.png")
    for part in (
        sent(local),
        sent(f"file://{local}"),
        {"type": "image", "path": local},
        {"type": "image", "image": "/etc/passwd"},
        {"type": "image", "image": "/nowhere"},
    ):
        assert "files on the server are not read for clients; expected data:image/png" in clients.refused(part, "x")
    assert "URLs are not downloaded" in clients.refused(sent("https://host/a.png"), "x")
    assert "is not base64" in clients.refused(sent("data:image/png;base64,?"), "x")
    assert "an image detail other than high" in clients.refused(sent(url(folder, 0), detail="low"), "x")
    assert "have 17 images; the limit is 16" in clients.refused(*[sent(url(folder, 0))] * 17, "x")
    assert "no file for image 1" in clients.refused({"type": "image_url"}, "x")
    held = io.BytesIO()
    Image.new("RGB", (8, 8)).save(held, "TIFF")
    tiff = "data:image/tiff;base64," + base64.b64encode(held.getvalue()).decode()
    assert "expected an image in PNG, JPEG" in clients.refused(sent(tiff), "x")
    monkeypatch.setattr(files, "MOST_PIXELS", 100)
    assert "pixels; expected at most 100 pixels" in clients.refused(sent(url(folder, 0)), "x")


def test_in_the_terminal(model: Callable[[str], Opened], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, prepared, generator = model(CHEAP)
    out = io.StringIO()
    terminal = Terminal(
        generator,
        ChatInputRenderer(prepared, ChatTemplateOptions(), RowImageFolders(folder.parent)),
        GenerationParams(),
        NEW,
        out=out,
    )
    lines = ["/image images/9.png", "/image images/3.png", "/clear", "/image images/0.png", "what is it?"]
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))
    terminal.run()
    assert "no such file" in out.getvalue() and out.getvalue().count("attached to the next message") == 2
    assert theirs(folder, CONVERSATIONS[0], prepared) in out.getvalue()
    assert [type(m["content"]) for m in terminal.messages] == [list, str] and terminal.images == []


def test_text_models_and_processors_that_do_not_load(model: Callable[[str], Opened], tmp_path: Path) -> None:
    """The reason stands where the image does; text is answered."""
    folder = vision.write_model(CHEAP, tmp_path / "model")
    for name in ("processor_config.json", "preprocessor_config.json"):
        (folder / name).unlink(missing_ok=True)
    prepared, generator = opened(folder)
    prompts = ChatInputRenderer(prepared, ChatTemplateOptions(), RowImageFolders(tmp_path))
    with pytest.raises(ChatInputError, match="images are not supported: .* has no processor"):
        prompts.of_chat(ask(shown(0), "x"))
    with pytest.raises(ChatInputError, match="images are not supported: .* has no processor"):
        prompts.image("0.png")
    assert (
        generator.generate([prompts.request(prompts.of_chat(ask("ab")), NEW, ())], GenerationParams())[0].tokens == NEW
    )
