"""Public programs whose training is watched: with what they are started, what is changed in them, and what is planted.

Changes are of single lines, for a CPU and for less work; a made-up file takes the place of a dataset that a repository
does not hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

Edits = Mapping[str, tuple[tuple[str, str], ...]]
"""By file: what is replaced by what."""


@dataclass(frozen=True, kw_only=True)
class Program:
    name: str
    repository: str
    script: str
    arguments: tuple[str, ...] = ()
    folder: str = "."
    """Where it is started, inside its repository."""
    edits: Edits = field(default_factory=dict)
    data: Callable[[Path], None] | None = None
    """Writes the files that it reads, in the folder of the repository."""
    environment: Mapping[str, str] = field(default_factory=dict)
    finding: str = ""
    """What has to be named of a planted bug; empty: nothing is wrong."""
    where: str = ""


def planted(
    base: Program, name: str, finding: str, where: str, edits: Edits, arguments: tuple[str, ...] = ()
) -> Program:
    files = base.edits.keys() | edits.keys()
    both = {file: (*base.edits.get(file, ()), *edits.get(file, ())) for file in files}
    return replace(
        base, name=f"{base.name}: {name}", edits=both, finding=finding, where=where,
        arguments=(*base.arguments, *arguments),
    )  # fmt: skip


DRAW = np.random.default_rng(7)
WORDS = [first + second for first in "bdfkl" for second in "aeiou"]


def text(count: int) -> str:
    """Words each of which depends on the one before."""
    moves, at, drawn = DRAW.dirichlet(np.full(len(WORDS), 0.2), len(WORDS)), 0, []
    for _ in range(count):
        at = int(DRAW.choice(len(WORDS), p=moves[at]))
        drawn.append(WORDS[at])
    return "\n".join(" ".join(drawn[place : place + 12]) for place in range(0, count, 12)) + "\n"


def characters(folder: Path) -> None:
    """nanoGPT's own format: characters as 16-bit numbers, and how many there are."""
    body = text(20_000)
    known = sorted(set(body))
    place = folder / "data" / "made"
    place.mkdir(parents=True)
    for name, part in (("train", body[: len(body) * 9 // 10]), ("val", body[len(body) * 9 // 10 :])):
        np.array([known.index(one) for one in part], dtype=np.uint16).tofile(place / f"{name}.bin")


def input_text(folder: Path) -> None:
    (folder / "input.txt").write_text(text(20_000))


def splits(folder: Path) -> None:
    for name in ("train", "valid", "test"):
        (folder / "word_language_model" / "data" / "wikitext-2" / f"{name}.txt").write_text(text(20_000))


def histories(users: int = 400, items: int = 120) -> list[list[int]]:
    """Items from 1 on, each near the one before."""
    return [
        [int(one) % items + 1 for one in DRAW.integers(0, items) + DRAW.integers(1, 5, 20).cumsum()]
        for _ in range(users)
    ]


def pairs(folder: Path) -> None:
    lines = [f"{user + 1} {item}" for user, own in enumerate(histories()) for item in own]
    (folder / "python" / "data").mkdir(exist_ok=True)
    (folder / "python" / "data" / "made.txt").write_text("\n".join(lines) + "\n")


def triplets(folder: Path) -> None:
    for name, part in (("train", slice(0, 17)), ("test", slice(17, 20))):
        lines = [f"{user} {item} 1" for user, own in enumerate(histories()) for item in own[part]]
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")


def ratings(folder: Path) -> None:
    own = [sorted(set(one)) for one in histories()]
    train = [f"{user}\t{item}\t1\t0" for user, items in enumerate(own) for item in items[:-1]]
    (folder / "ml-1m.train.rating").write_text("\n".join(train) + "\n")
    tested = [f"({user},{items[-1]})\t" + "\t".join(map(str, range(1, 100))) for user, items in enumerate(own)]
    (folder / "ml-1m.test.negative").write_text("\n".join(tested) + "\n")
    (folder / "tensorboardX.py").write_text("SummaryWriter = object\n")


def citations(folder: Path) -> None:
    papers, kinds, words = 1600, 5, 60
    kind = DRAW.integers(0, kinds, papers)
    shown = DRAW.random((papers, words)) < np.where(np.arange(words) % kinds == kind[:, None], 0.3, 0.05)
    shown[:, 0] = True
    place = folder / "data" / "cora"
    place.mkdir(parents=True, exist_ok=True)
    rows = [f"{at} {' '.join(map(str, shown[at].astype(int)))} kind{kind[at]}" for at in range(papers)]
    (place / "cora.content").write_text("\n".join(rows) + "\n")
    cited = [DRAW.choice(np.flatnonzero(kind == kind[at]), 3) for at in range(papers)]
    edges = [f"{at} {other}" for at, own in enumerate(cited) for other in own]
    (place / "cora.cites").write_text("\n".join(edges) + "\n")


def callbacks(folder: Path) -> None:
    """In place of tensorflow: callbacks that do nothing."""
    place = folder / "tensorflow" / "python" / "keras"
    place.mkdir(parents=True)
    (place / "callbacks.py").write_text(
        "class History: pass\n"
        "class EarlyStopping: pass\n"
        "class ModelCheckpoint: pass\n"
        "class CallbackList:\n"
        "    def __init__(self, *_): pass\n"
        "    def set_model(self, model): self.model = model\n"
        "    def __getattr__(self, name):\n"
        "        if name.startswith('on_'): return lambda *_: None\n"
        "        raise AttributeError(name)\n"
    )


MAKEMORE = Program(
    name="makemore, transformer", repository="karpathy/makemore", script="makemore.py", arguments=("-n", "0")
)
MINGPT = Program(
    name="minGPT, adder", repository="karpathy/minGPT", script="adder.py", folder="projects/adder",
    arguments=("--trainer.num_workers=0",), environment={"PYTHONPATH": "."},
)  # fmt: skip
NANOGPT = Program(
    name="nanoGPT, accumulated gradients", repository="karpathy/nanoGPT", script="train.py", data=characters,
    arguments=(
        "--device=cpu", "--compile=False", "--dataset=made", "--block_size=32", "--n_layer=2", "--n_head=2",
        "--n_embd=32", "--dropout=0.2", "--gradient_accumulation_steps=4", "--eval_iters=2", "--eval_interval=1000",
        "--warmup_iters=10", "--backend=gloo",
    ),
    # The vocabulary of GPT-2 would be most of the model.
    edits={"train.py": (("else 50304", "else 64"),)},
)  # fmt: skip
ON_CPU = (
    ("device = f'cuda:{ddp_local_rank}'", "device = 'cpu'"),
    ("torch.cuda.set_device(device)", "pass"),
    ("device_ids=[ddp_local_rank]", "device_ids=None"),
)
LECTURE = Program(
    name="gpt of a lecture", repository="karpathy/ng-video-lecture", script="gpt.py", data=input_text,
    edits={"gpt.py": (
        ("block_size = 256", "block_size = 32"), ("n_embd = 384", "n_embd = 48"), ("n_layer = 6", "n_layer = 2"),
        ("eval_iters = 200", "eval_iters = 2"), ("batch_size = 64", "batch_size = 8"),
    )},
)  # fmt: skip
SASREC = Program(
    name="SASRec.pytorch", repository="pmixer/SASRec.pytorch", script="main.py", folder="python", data=pairs,
    arguments=("--dataset", "made", "--train_dir", "out", "--device", "cpu", "--maxlen", "20"),
)  # fmt: skip
CASER = Program(
    name="caser_pytorch", repository="graytowne/caser_pytorch", script="train_caser.py", data=triplets,
    # It reads its arguments twice, and refuses those that the other reading knows.
    edits={"train_caser.py": (
        ("default='datasets/ml1m/test/train.txt'", "default='train.txt'"), ("default=512", "default=128"),
        ("default='datasets/ml1m/test/test.txt'", "default='test.txt'"), ("str2bool, default=True", "str, default=''"),
    )},
)  # fmt: skip
WITHOUT_CUDA = ((".cuda()", ""),)
NCF = Program(
    name="NCF", repository="guoyang9/NCF", script="main.py", data=ratings,
    edits={
        "main.py": (*WITHOUT_CUDA, ("num_workers=4", "num_workers=0")), "evaluate.py": WITHOUT_CUDA,
        "config.py": (("/home/share/guoyangyang/recommendation/NCF-Data/", "./"),),
    },
)  # fmt: skip
PYGCN = Program(
    name="pygcn", repository="tkipf/pygcn", script="train.py", folder="pygcn", data=citations,
    environment={"PYTHONPATH": "."},
)  # fmt: skip
TCN = Program(
    name="TCN, adding problem", repository="locuslab/TCN", script="add_test.py", folder="TCN/adding_problem",
    arguments=("--seq_len", "50", "--levels", "4", "--cuda"),
)  # fmt: skip
DEEPFM = Program(
    name="DeepCTR-Torch, DeepFM", repository="shenweichen/DeepCTR-Torch", script="run_classification_criteo.py",
    folder="examples", environment={"PYTHONPATH": "."}, data=callbacks,
)  # fmt: skip
BATCH_NORM = {"examples/run_classification_criteo.py": (("task='binary',", "task='binary', dnn_use_bn=True,"),)}
LSTM = Program(
    name="word language model, LSTM", repository="pytorch/examples", script="main.py", folder="word_language_model",
    arguments=("--use-optimizer", "--lr", "0.001", "--emsize", "32", "--nhid", "32", "--bptt", "10"), data=splits,
)  # fmt: skip
SOUND = [
    MAKEMORE,
    replace(MAKEMORE, name="makemore, GRU", arguments=("-n", "0", "--type", "gru")),
    replace(MAKEMORE, name="makemore, MLP", arguments=("-n", "0", "--type", "mlp")),
    MINGPT,
    NANOGPT,
    planted(NANOGPT, "autocast to bfloat16", "", "", {"train.py": (
        ("ctx = nullcontext() if device_type == 'cpu' else torch", "ctx = torch"),)}),
    planted(NANOGPT, "compiled", "", "", {}, ("--compile=True",)),
    replace(
        planted(NANOGPT, "DistributedDataParallel", "", "", {"train.py": ON_CPU}),
        environment={"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
                     "MASTER_PORT": "29617"},
    ),
    planted(NANOGPT, "frozen blocks", "", "", {"train.py": (
        ("model.to(device)\n", "model.to(device)\nmodel.transformer.h.requires_grad_(False)\n"),)}),
    LECTURE, SASREC, CASER, NCF, PYGCN, TCN, DEEPFM,
    # Its own validation leaves the whole model in eval mode: see the planted bugs.
    planted(DEEPFM, "batch norm in eval mode", "", "", {
        **BATCH_NORM,
        "deepctr_torch/models/basemodel.py": (
            ("on_epoch_begin(epoch)\n", "on_epoch_begin(epoch)\n            self.train().dnn.bn.eval()\n"),),
    }),
    LSTM,
]  # fmt: skip
BUGS = [
    planted(MAKEMORE, "an optimizer without the embeddings", "not-optimized", "transformer.wte", {"makemore.py": (
        ("AdamW(model.parameters()", "AdamW([one for name, one in model.named_parameters() if 'wte' not in name]"),)}),
    planted(MINGPT, "gradients are not cleared", "not-cleared", "AdamW", {"mingpt/trainer.py": (
        ("model.zero_grad(set_to_none=True)", "pass"),)}),
    planted(NANOGPT, "left in eval mode", "eval-mode", "model", {"train.py": (("    model.train()\n", ""),)}),
    planted(NANOGPT, "a rate of zero", "zero-rate", "AdamW", {"train.py": (
        ("return min_lr + coeff * (learning_rate - min_lr)", "return 0"),
        ("return learning_rate * (it + 1) / (warmup_iters + 1)", "return 0"),)}),
    planted(LECTURE, "positions are left out", "no-gradient", "position_embedding_table", {"gpt.py": (
        ("x = tok_emb + pos_emb", "x = tok_emb"),)}),
    planted(SASREC, "the positions' table detached", "no-gradient", "pos_emb", {"python/model.py": (
        ("self.pos_emb(torch.LongTensor(poss).to(self.dev))", "self.pos_emb(torch.LongTensor(poss)).detach()"),)}),
    planted(CASER, "a rate that is too large", "non-finite", "", {"train_caser.py": (
        ("type=float, default=1e-3", "type=float, default=30"),)}),
    planted(NCF, "dead units", "dead-units", "MLP_layers", {"model.py": (
        ("m.bias.data.zero_()", "m.bias.data.fill_(-30)"),)}),
    planted(PYGCN, "a table of zeros as input", "zero-gradient", "gc1", {"pygcn/train.py": (
        ("output = model(features, adj)", "output = model(0 * features, adj)"),)}),
    planted(TCN, "a rate that is too large", "non-finite", "", {}, ("--lr", "100", "--optim", "SGD")),
    planted(DEEPFM, "no step", "no-step", "", {"deepctr_torch/models/basemodel.py": (("optim.step()", "pass"),)}),
    planted(DEEPFM, "its own, in eval mode after the first validation", "eval-mode", "model", BATCH_NORM),
    planted(LSTM, "ids folded into few rows", "unused-rows", "encoder", {"word_language_model/model.py": (
        ("self.encoder(input)", "self.encoder(input % 4)"),)}),
    planted(MAKEMORE, "targets of other rows", "wrong labels", "", {"makemore.py": (
        ("X, Y = batch", "X, Y = batch; Y = Y[torch.randperm(len(Y))]"),)}),
]  # fmt: skip
