"""The model that this machine trains in an hour on Jane Austen's novels, beside the same recipe in nanoGPT.

    python -m bench.hour NANOGPT --out DIR [--minutes 60]

NANOGPT is a checkout of github.com/karpathy/nanoGPT. Its train.py runs as it is, with the torch of this environment.
Both have the tokens, width, depth, heads, context, batch, AdamW and schedule of configs/local_hour.yaml, in f32. Ours
is a Llama (RMSNorm, RoPE, SwiGLU), nanoGPT's a GPT-2 (LayerNorm, learned positions, GELU) of about as many parameters.

One trains after the other, which takes more than two hours; a line tells when each ends. Each makes as many steps as
its time holds, start and compilation included, as two short runs tell, so that its learning rate ends at 0. No run
reads what another has compiled. NANOGPT gets the tokens, in data/austen_hour. Then both are scored on the validation
text: each document is cut into windows of the context, which do not see each other. DIR keeps the models. A second call
scores those that it has.
"""

import json
import lzma
import math
import os
import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch.nn import functional as F

from bench.common import parser_of
from shardwright.sampling.scoring import pieces
from shardwright_data.flat_tokens import Reader
from shardwright_data.text.tokenizers import Tokenizer, tokenizer_of_dataset

ROOT = Path(__file__).parents[1]
TEXT, PROMPT, SAMPLED = "tests/data/austen_{}.jsonl.xz", "It was", 120
SHORT = 20, 80  # steps of the two short runs
MARGIN = 0.97  # part of the time for which steps are planned: a machine is not equally fast in each minute


def call(*command: str, at: Path = ROOT) -> str:
    """Output of a program for this Python, run in the directory `at`. Raises CalledProcessError if it fails."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}  # as make demo
    environment["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    run = subprocess.run([sys.executable, *command], cwd=at, env=environment, stdout=subprocess.PIPE, check=True)
    return run.stdout.decode()


def trained(minutes: float, warmup: int, train: Callable[[int, bool], object]) -> str:
    """Trains for so long. Tells steps and seconds. train(steps, is_short) makes a run of so many steps.

    Ends the program if no more steps fit than those of the warmup.
    """

    def seconds(steps: int, is_short: bool = False) -> float:
        begin = time.monotonic()
        train(steps, is_short)
        return time.monotonic() - begin

    steps = steps_in(60 * minutes, [seconds(count, True) for count in SHORT])
    if steps <= warmup:
        sys.exit(f"{steps} steps fit in {minutes:g} minutes, and the warmup alone has {warmup}: give more --minutes.")
    until = time.strftime("%H:%M", time.localtime(time.time() + 60 * minutes))
    print(f"    {steps:,} steps until about {until}", flush=True)
    return f"{steps:,} steps in {seconds(steps):,.0f} s"


def steps_in(seconds: float, short: list[float]) -> int:
    """Steps that a time holds. `short`: seconds of runs of SHORT steps."""
    step = (short[1] - short[0]) / (SHORT[1] - SHORT[0])
    return int(MARGIN * (seconds - short[0]) / step) + SHORT[0] if step > 0 else 0


def documents(tokenizer: Tokenizer, split: str) -> list[tuple[list[int], int]]:
    """Token ids of each document of the text, the end token included, and the bytes of its text."""
    with lzma.open(ROOT / TEXT.format(split), "rt") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    return [([*tokenizer.ids(text), tokenizer.end], len(text.encode())) for text in texts]


class Ours:
    """A run of configs/local_hour.yaml."""

    def __init__(self, out: Path):
        self.out, self.run = out, out / "ours"

    def train(self, steps: int, is_short: bool) -> None:
        """Makes the run; a short one does not last."""
        name = f"short_{steps}" if is_short else "unfinished"
        options = [f"training.steps={steps}", f"paths.root_working_dir={self.out}", f"paths.model_name={name}"]
        options += ["hardware.compilation_cache=null", *["optimizer.schedule_steps=1000"] * is_short]
        shutil.rmtree(self.out / name, ignore_errors=True)  # of a call that was stopped
        call("-m", "train", "--config-name=local_hour", *options)
        if is_short:
            shutil.rmtree(self.out / name)
        else:
            (self.out / name).rename(self.run)

    def nats(self, documents: list[tuple[list[int], int]], length: int) -> float:
        """Sum of the losses of all tokens, by tools.evaluate."""
        options = [f"run={self.run}", f"data={TEXT.format('validation')}", f"out={self.out}/ours.jsonl"]
        call("-m", "tools.evaluate", *options)
        found = json.loads((self.out / "ours.jsonl").read_text().splitlines()[-1])
        return found["loss"] * found["tokens"]

    def sample(self, tokenizer: Tokenizer) -> str:
        options = [f"max_tokens={SAMPLED}", "temperature=0.8", "seed=1", f"output={self.out}/sample.jsonl"]
        call("-m", "tools.generate", f"run={self.run}", f"prompt={PROMPT}", *options)
        return PROMPT + json.loads((self.out / "sample.jsonl").read_text())["text"]


class NanoGPT:
    """A run of nanoGPT's train.py with the same settings."""

    def __init__(self, checkout: Path, out: Path, recipe: dict[str, Any], tokenizer: Tokenizer):
        self.checkout, self.run = checkout, out / "nanogpt"
        m, o, t = (recipe[name] for name in ("model", "optimizer", "training"))
        data = checkout / "data/austen_hour"
        data.mkdir(parents=True, exist_ok=True)
        for split, name in (("train", "train"), ("validation", "val")):
            ids = [i for document, _ in documents(tokenizer, split) for i in document]
            np.array(ids, np.uint16).tofile(data / f"{name}.bin")
        (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": m["vocab"]}))
        settings = {"dataset": data.name, "device": "cpu", "dtype": "float32", "bias": False, "dropout": 0.0}
        settings |= {"n_layer": m["layers"], "n_head": m["n_kv"] * m["n_q_per_kv"], "n_embd": m["d_model"]}
        settings |= {"block_size": t["seq_len"], "batch_size": t["batch_size"], "gradient_accumulation_steps": 1}
        settings |= {"learning_rate": o["learning_rate"], "min_lr": 0.0, "warmup_iters": o["warmup_steps"]}
        settings |= {"weight_decay": o["weight_decay"], "beta2": o["adam_b2"], "eval_iters": 1}
        self.settings = [f"--{name}={value}" for name, value in settings.items()]

    def train(self, steps: int, is_short: bool) -> None:
        """Makes the run. It saves the model when it evaluates, which it does before its last step."""
        made = self.run.with_name("nanogpt_unfinished")
        options = [f"--max_iters={steps}", f"--eval_interval={steps}", f"--out_dir={made}"]
        options += [f"--lr_decay_iters={1000 if is_short else steps}"]
        call("train.py", *self.settings, *options, at=self.checkout)
        if not is_short:
            made.rename(self.run)

    def model(self) -> Any:
        sys.path.insert(0, str(self.checkout))
        from model import GPT, GPTConfig

        saved = torch.load(self.run / "ckpt.pt", weights_only=True)
        model = GPT(GPTConfig(**saved["model_args"])).eval()
        model.load_state_dict({name.removeprefix("_orig_mod."): x for name, x in saved["model"].items()})
        return model

    @torch.no_grad()
    def nats(self, documents: list[tuple[list[int], int]], length: int) -> float:
        """Sum of the losses of all tokens. The token before a window is that between documents, here the end token."""
        model, total = self.model(), 0.0
        for ids, _ in documents:
            for piece in pieces(ids, ids[-1], length):
                x = torch.tensor(piece)
                logits, _ = model(x[None, :-1], x[None, 1:])  # with targets it gives the logits of all positions
                total += F.cross_entropy(logits[0].double(), x[1:], reduction="sum").item()
        return total

    def sample(self, tokenizer: Tokenizer) -> str:
        torch.manual_seed(1)
        ids = torch.tensor([[tokenizer.end, *tokenizer.ids(PROMPT)]])
        found = self.model().generate(ids, SAMPLED, temperature=0.8)[0, 1:].tolist()
        return tokenizer.decode(found[: found.index(tokenizer.end) if tokenizer.end in found else None])


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("nanogpt", type=Path, metavar="NANOGPT", help="a checkout of nanoGPT")
    parser.add_argument("--out", type=Path, required=True, help="directory of the models")
    parser.add_argument("--minutes", type=float, default=60.0, help="of each training")
    args = parser.parse_args()
    checkout, out = args.nanogpt.resolve(), args.out.resolve()
    if not (checkout / "configurator.py").exists():
        parser.error(f"{checkout} is no checkout of nanoGPT: git clone it from github.com/karpathy/nanoGPT")
    out.mkdir(parents=True, exist_ok=True)
    recipe = yaml.safe_load((ROOT / "configs/local_hour.yaml").read_text())
    data = recipe["data"]["filespec"]
    if not (ROOT / data).exists():
        options = [f"tokenizer.vocab_size={recipe['model']['vocab']}", f"out={data}"]
        call("-m", "tools.huggingface_to_flat_tokens", "--config-name=austen_bpe", *options)
    tokenizer = tokenizer_of_dataset(Reader(str(ROOT / data), "train"))
    texts = documents(tokenizer, "validation")
    warmup = recipe["optimizer"]["warmup_steps"]
    tokens, size = sum(len(ids) for ids, _ in texts), sum(size for _, size in texts)
    print(f"{'':10}{'nats a token':>14}{'bits a byte':>13}   of {tokens:,} tokens, {size:,} bytes")
    for name, one in (("ours", Ours(out)), ("nanoGPT", NanoGPT(checkout, out, recipe, tokenizer))):
        told = "as it was" if one.run.exists() else trained(args.minutes, warmup, one.train)
        nats = one.nats(texts, recipe["training"]["seq_len"])
        print(f"{name:10}{nats / tokens:14.4f}{nats / math.log(2) / size:13.4f}   {told}", flush=True)
        print("    " + " ".join(one.sample(tokenizer).split()), flush=True)


if __name__ == "__main__":
    main()
