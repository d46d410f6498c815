"""An exported tokenizer gives the ids that the run was trained on, after model.bos_id."""

import json

import pytest
from tokenization import PROBES
from tokenizers import Tokenizer
from written_datasets import write

from shardwright_data.text import definitions
from shardwright_data.text.definitions import byte_definition
from shardwright_data.text.huggingface import find_tokenizer, tokenizer_files
from shardwright_data.text.tokenizers import load_definition, open_tokenizer

TEXTS = [*[text for text in PROBES if "<s>" not in text], "", "It is a truth universally acknowledged, naïve 東京"]


@pytest.fixture(scope="module")
def bpe():
    return definitions.train_bpe(TEXTS, 400)


def ids_of(files, text):
    return Tokenizer.from_str(json.dumps(files["tokenizer.json"])).encode(text).ids


def test_bytes():
    files, end, notes = tokenizer_files(byte_definition(), 0, "</s>")
    assert end == 1
    assert not notes
    for text in TEXTS:
        expected = open_tokenizer("bytes").encode([text]).ids
        assert ids_of(files, text) == [0, *expected]
        ids = ids_of(files, text)
        assert Tokenizer.from_str(byte_definition()).decode(ids, skip_special_tokens=True) == text
    assert Tokenizer.from_str(byte_definition()).get_vocab_size() == 259


def test_a_tokenizer_of_text_goes_through(bpe):
    files, end, notes = tokenizer_files(bpe, 0, "<|end|>")
    assert (end, notes) == (1, [])
    assert files["tokenizer_config.json"]["bos_token"] == "<|begin|>"
    assert files["tokenizer_config.json"]["eos_token"] == "<|end|>"
    for text in TEXTS:
        assert ids_of(files, text) == [0, *load_definition(bpe).encode(text, add_special_tokens=False).ids]


def test_what_a_tokenizer_put_around_text_is_left_out(bpe):
    """A dataset's ids are those of its text alone; they are neither cut nor padded."""
    tokenizer = Tokenizer.from_str(bpe)
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    content = json.loads(tokenizer.to_str())
    content["post_processor"] = tokenizer_files(bpe, 1, None)[0]["tokenizer.json"]["post_processor"]
    files, end, _ = tokenizer_files(json.dumps(content), 0, None)
    assert end is None
    for text in TEXTS:
        assert ids_of(files, text) == [0, *load_definition(bpe).encode(text, add_special_tokens=False).ids]


def test_a_begin_token_of_text_or_none_at_all_is_said(bpe):
    letter = load_definition(bpe).token_to_id("a")
    files, _, notes = tokenizer_files(bpe, letter, "<|end|>")
    assert notes == ["its bos_token 'a' is a token of text too"]
    assert "bos_token" not in files["tokenizer_config.json"]
    assert ids_of(files, "a")[0] == letter
    files, _, notes = tokenizer_files(bpe, 10_000, "<|end|>")
    assert notes == ["it has no token of id 10000 (model.bos_id): put that id before the text's yourself"]
    assert ids_of(files, "a") == [letter]


def test_transformers_opens_them(tmp_path, bpe):
    transformers = pytest.importorskip(
        "transformers", reason="opening needs transformers, installed on Python 3.11 only"
    )
    for name, definition, end in (("bytes", byte_definition(), "</s>"), ("bpe", bpe, "<|end|>")):
        files, end_id, _ = tokenizer_files(definition, 0, end)
        directory = tmp_path / name
        directory.mkdir()
        for file, content in files.items():
            (directory / file).write_text(json.dumps(content))
        (directory / "config.json").write_text('{"model_type": "llama"}')
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, end_id)
        for text in TEXTS:
            assert tokenizer(text)["input_ids"] == ids_of(files, text)
            assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


@pytest.mark.parametrize(("bos", "end", "pad"), [(0, "<|end|>", 1), (0, None, 0), (300, None, 0)])
def test_a_batch_of_a_bpe_is_padded(tmp_path, bpe, bos, end, pad):
    """A model of transformers gives each text of a padded batch the logits that it has alone."""
    transformers = pytest.importorskip(
        "transformers", reason="padding needs transformers, installed on Python 3.11 only"
    )
    torch = pytest.importorskip("torch")
    for file, content in tokenizer_files(bpe, bos, end)[0].items():
        (tmp_path / file).write_text(json.dumps(content))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    texts = ["It is", "It is a truth universally"]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    assert batch["input_ids"][0, -1] == tokenizer.pad_token_id == pad
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=len(tokenizer), **sizes)).eval()
    with torch.no_grad():
        together = model(**batch).logits
        for i, text in enumerate(texts):
            alone = model(**tokenizer(text, return_tensors="pt")).logits[0]
            torch.testing.assert_close(together[i, : len(alone)], alone, atol=1e-5, rtol=1e-4)


def test_a_vocabulary_without_special_tokens_is_said(bpe):
    files, _, notes = tokenizer_files(json.dumps(json.loads(bpe) | {"added_tokens": []}), 10_000, None)
    assert notes[1:] == ["it has no special token: set a pad_token before you pad batches"]
    assert "pad_token" not in files["tokenizer_config.json"]


def test_where_it_is_found(tmp_path, bpe):
    by_bytes = write(tmp_path / "bytes", attributes={"tokenizer": {"kind": "bytes", "end_token": "</s>"}})
    by_bpe = write(tmp_path / "bpe", attributes={"tokenizer": {"kind": "train_bpe", "end_token": "<|end|>"}})
    (tmp_path / "bpe" / "tokenizer.json").write_text(bpe)
    nothing = write(tmp_path / "nothing", attributes={})
    mixture = lambda *names: {"mixture": {name: {"filespec": name} for name in names}}
    assert find_tokenizer({"filespec": by_bytes}) == (byte_definition(), "</s>")
    assert find_tokenizer({"filespec": by_bpe, "mixture": {}}) == (bpe, "<|end|>")
    assert find_tokenizer({"filespec": nothing}, dataset=by_bpe) == (bpe, "<|end|>")
    assert find_tokenizer(mixture(by_bpe, by_bpe)) == (bpe, "<|end|>")
    stream = {"stream": {"tokenizer_kind": "bytes", "tokenizer": None, "end_token": None}}
    assert find_tokenizer(stream) == (byte_definition(), None)
    file = {"tokenizer_kind": "huggingface", "tokenizer": f"{by_bpe}/tokenizer.json", "end_token": "<|end|>"}
    assert find_tokenizer({"stream": file}) == (bpe, "<|end|>")
    with pytest.raises(ValueError, match="the datasets have different ones"):
        find_tokenizer(mixture(by_bpe, by_bytes))
    with pytest.raises(ValueError, match="names none"):
        find_tokenizer({"filespec": nothing})
    with pytest.raises(ValueError, match="names no dataset; give dataset="):
        find_tokenizer({})
    (tmp_path / "bpe" / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"tokenizer.json is missing"):
        find_tokenizer({"filespec": by_bpe})
