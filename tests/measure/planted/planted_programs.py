"""Small training programs with one planted defect each, which a rule over the source must find, name and change.

`fast` is the best known change, as a replacement of text; `share` is the part of its saving that the edit must reach.
"""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import dedent

START = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
torch.manual_seed(0)
torch.set_num_threads(1)
"""


@dataclass(frozen=True)
class PlantedProgram:
    name: str
    advice: str
    text: str
    slow: str
    """A line of the defect."""
    fast: dict[str, str]
    """The best known change."""
    limits: tuple[str, ...]
    same: bool = True
    """Whether the edit keeps the losses."""
    edit: bool = True
    """Whether the change is an edit that a rule over the source makes, not a setting."""


PROGRAMS: list[PlantedProgram] = []


def planted(
    name: str,
    advice: str,
    text: str,
    slow: str,
    fast: dict[str, str],
    *limits: str,
    same: bool = True,
    edit: bool = True,
) -> None:
    PROGRAMS.append(PlantedProgram(name, advice, START + dedent(text), slow, fast, limits, same, edit))


LOOP = """
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.rand(256, 32), (torch.rand(256) > 0.5).float()
    {before}
    for step in range(STEPS):
        scores = model(x).squeeze(1)
        loss = F.binary_cross_entropy_with_logits(scores, y)
        optimizer.zero_grad()
        loss.backward()
        {middle}
        optimizer.step()
        {after}
"""


def loop(before: str = "", middle: str = "", after: str = "") -> str:
    def at(text: str, indent: str) -> str:
        return dedent(text).strip().replace("\n", f"\n{indent}")

    return LOOP.format(before=at(before, " " * 4), middle=at(middle, " " * 8), after=at(after, " " * 8))


DEEP = (
    "model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(40)], nn.Linear(32, 1))\n"
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.01)"
)
planted(
    "anomaly mode", "anomaly mode", loop("torch.autograd.set_detect_anomaly(True)"),
    "set_detect_anomaly(True)", {"anomaly(True)": "anomaly(False)"}, "python", "operator", "dispatch",
)  # fmt: skip
planted(
    "a metric per step", "reports",
    loop("from sklearn.metrics import roc_auc_score", "",
         "auc = roc_auc_score(y.numpy(), scores.detach().numpy())\nprint(end='' if auc else ' ')"),
    "roc_auc_score(y", {"auc = roc": "auc = 1 if step % 100 else roc"}, "python",
)  # fmt: skip
planted(
    "a checkpoint per step", "reports",
    loop("import tempfile\nfolder = tempfile.mkdtemp()", "", "torch.save(model.state_dict(), f'{folder}/model.pt')"),
    "torch.save", {"torch.save(": "step % 100 or torch.save("}, "python", "blocked",
)  # fmt: skip
planted(
    "gc.collect", "reports", loop("import gc", "", "gc.collect()"), "gc.collect()",
    {"gc.collect()": "step % 100 or gc.collect()"}, "python",
)  # fmt: skip
planted(
    "a log synced to disk", "reports",
    loop("import os, tempfile\nlog = tempfile.TemporaryFile('w')", "",
         "log.write(f'{loss}')\nlog.flush()\nos.fsync(log.fileno())"),
    "os.fsync", {"os.fsync": "step % 100 or os.fsync"}, "python", "blocked",
)  # fmt: skip
planted(
    "an average of weights by deep copy", "deep copy",
    loop(DEEP + "\nimport copy\naverage = copy.deepcopy(model.state_dict())", "",
         "new = copy.deepcopy(model.state_dict())\n"
         "for name in average:\n    average[name] = 0.99 * average[name] + 0.01 * new[name]"),
    "new = copy.deepcopy", {"new = copy.deepcopy(model.state_dict())": "new = model.state_dict()"}, "python",
)  # fmt: skip
ONE_BY_ONE = "for p in model.parameters():\n{0}if p.grad is not None:\n    {0}torch.nn.utils.clip_grad_norm_(p, 1.0)"
planted(
    "clipping per parameter", "clipping",
    loop(DEEP,
         ONE_BY_ONE.format("    ")),
    "clip_grad_norm_", {ONE_BY_ONE.format(" " * 8): "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"},
    "dispatch", "python", same=False,
)  # fmt: skip
planted(
    "needless copies", "copies",
    """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.out = nn.Embedding(1000, 256), nn.Linear(256, 1)

        def forward(self, ids):
            rows = self.table(ids).clone().contiguous().clone()
            rows = rows.clone().view(-1, 256)
            return self.out(rows.clone().relu()).mean()

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.randint(1000, (64, 100))).backward()
        optimizer.step()
    """,
    "clone()", {".clone()": "", ".contiguous()": ""}, "bandwidth", "cache", "operator",
)  # fmt: skip
planted(
    "ids as lists", "lists",
    """
    table = torch.rand(10_000, 16)
    model = nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        ids = torch.randint(10_000, (8192,))
        loss = model(table[ids.tolist()]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    """,
    "ids.tolist()", {".tolist()": ""}, "python", "operator", "cache",
)  # fmt: skip
planted(
    "strings hashed in collate", "hashing",
    """
    import hashlib
    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 64 * STEPS
        def __getitem__(self, row):
            return [f"user-{row % 100}", f"item-{row % 37}", f"city-{row % 11}"] * 4

    def collate(rows):
        return torch.tensor([[hashed(text) for text in row] for row in rows])

    def hashed(text):
        return int(hashlib.sha256(text.encode()).hexdigest(), 16) % 5000

    model = nn.EmbeddingBag(5000, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in DataLoader(Rows(), 64, collate_fn=collate):
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    """,
    "hashlib.sha256", {"hashed(text) for": "len(text) for"},
    "input",
)  # fmt: skip
planted(
    "negatives drawn in Python", "negatives",
    """
    import random
    user, item = nn.Embedding(1000, 16), nn.Embedding(5000, 16)
    optimizer = torch.optim.SGD([*user.parameters(), *item.parameters()], lr=0.01)
    for step in range(STEPS):
        users = torch.randint(1000, (256,))
        negatives = torch.tensor([[random.randint(0, 4999) for _ in range(20)] for _ in users])
        loss = (user(users).unsqueeze(1) * item(negatives)).sum(-1).sigmoid().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    """,
    "random.randint",
    {"torch.tensor([[random.randint(0, 4999) for _ in range(20)] for _ in users])": "torch.randint(5000, (256, 20))"},
    "python", same=False,
)  # fmt: skip
planted(
    "ragged rows padded", "padding",
    """
    lengths = (torch.rand(64 * STEPS) ** 8 * 400 + 4).long()
    rows = [torch.randint(1, 1000, (length,)) for length in lengths.tolist()]

    def collate(batch):
        return nn.utils.rnn.pad_sequence([row for row in batch], batch_first=True)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(1000, 32, padding_idx=0)
            self.inner, self.out = nn.Linear(32, 64), nn.Linear(64, 1)
        def forward(self, x):
            return self.out(self.inner(self.table(x)).relu()).mean()

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(rows, batch_size=16, shuffle=True, collate_fn=collate)
    for batch in loader:
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()
    """,
    "pad_sequence",
    {"loader = DataLoader(rows, batch_size=16, shuffle=True,":
     "order = sorted(range(len(rows)), key=lambda row: len(rows[row]))\n"
     "parts = [order[at : at + 16] for at in range(0, len(order), 16)]\n"
     "loader = DataLoader(rows, batch_sampler=[parts[at] for at in torch.randperm(len(parts)).tolist()],"},
    "cache", "compute", "bandwidth", "operator", same=False,
)  # fmt: skip
planted(
    "one-hot times a matrix", "one-hot",
    """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.out = nn.Linear(2000, 16), nn.Linear(16, 1)
        def forward(self, ids):
            rows = F.one_hot(ids, 2000).float()
            return self.out(self.table(rows)).square().mean()

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.randint(2000, (512,))).backward()
        optimizer.step()
    """,
    "self.table(rows)",
    {"F.one_hot(ids, 2000).float()": "F.embedding(ids, self.table.weight.t()) + self.table.bias",
     "self.table(rows)": "rows"},
    "compute", "bandwidth", "operator", "cache",
)  # fmt: skip
planted(
    "a loop per user", "rows",
    """
    user, item = nn.Embedding(1000, 16), nn.Embedding(5000, 16)
    optimizer = torch.optim.SGD([*user.parameters(), *item.parameters()], lr=0.01)
    for step in range(STEPS):
        users, items = torch.randint(1000, (128,)), torch.randint(5000, (128, 20))
        u, v = user(users), item(items)
        scores = []
        for row in range(len(users)):
            scores.append((v[row] @ u[row]).sigmoid())
        loss = torch.stack(scores).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    """,
    "v[row] @ u[row]",
    {"scores = []": "scores = (v @ u.unsqueeze(2)).sigmoid()", "for row in range(len(users)):": "if 0:",
     "torch.stack(scores)": "scores"},
    # The backward pass of each row fills a gradient of all rows.
    "dispatch", "python", "operator", "cache",
)  # fmt: skip
planted(
    "a loop of GRUCell", "time steps",
    """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.cell, self.out = nn.Embedding(1000, 32), nn.GRUCell(32, 32), nn.Linear(32, 1)
        def forward(self, ids):
            x = self.table(ids)
            h = torch.zeros(x.shape[0], 32)
            states = []
            for t in range(x.shape[1]):
                h = self.cell(x[:, t], h)
                states.append(h)
            return self.out(torch.stack(states, 1)).square().mean()

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.randint(1000, (8, 50))).backward()
        optimizer.step()
    """,
    "self.cell(x",
    {"nn.GRUCell(32, 32)": "nn.GRU(32, 32, batch_first=True)", "torch.stack(states, 1)": "states",
     "for t in range(x.shape[1]):": "states, _ = self.cell(x, h[None])\n        if 0:"},
    "dispatch", "python", "operator", "cache",
)  # fmt: skip
planted(
    "unique ids", "unique",
    """
    table = nn.Embedding(20_000, 2)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.01)
    for step in range(STEPS):
        ids = torch.randint(20_000, (200_000,))
        some, back = torch.unique(ids, return_inverse=True)
        loss = table(some)[back].square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    """,
    "torch.unique", {"some, back = torch.unique(ids, return_inverse=True)": "pass", "table(some)[back]": "table(ids)"},
    "operator", "cache", "latency",
)  # fmt: skip
planted(
    "float64", "float64",
    """
    import numpy as np
    data = np.random.rand(4096, 64)
    x = torch.from_numpy(data)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        loss = model(x[:1024]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    """,
    "model(x", {"torch.from_numpy(data)": "torch.from_numpy(data).float()", ".double()": ".float()"},
    "compute", "cache", "bandwidth", same=False,
)  # fmt: skip
planted(
    "small tables", "tables",
    """
    SIZES = [96] * 40
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tables = nn.ModuleList([nn.Embedding(size, 8) for size in SIZES])
            self.out = nn.Linear(8 * len(SIZES), 1)
        def forward(self, ids):
            rows = [table(ids[:, i]) for i, table in enumerate(self.tables)]
            return self.out(torch.cat(rows, 1)).square().mean()

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.randint(96, (64, len(SIZES)))).backward()
        optimizer.step()
    """,
    "table(ids",
    {"nn.ModuleList([nn.Embedding(size, 8) for size in SIZES])": "nn.Embedding(sum(SIZES), 8)",
     "[table(ids[:, i]) for i, table in enumerate(self.tables)]":
     "[self.tables(ids + 96 * torch.arange(40)).flatten(1)]"},
    "dispatch", "python", same=False,
)  # fmt: skip
planted(
    "rows of a frame", "rows of frames",
    """
    import pandas as pd
    class Rows(torch.utils.data.Dataset):
        def __init__(self):
            self.frame = pd.DataFrame({"user": range(64 * STEPS), "item": range(64 * STEPS)})
        def __len__(self):
            return len(self.frame)
        def __getitem__(self, number):
            row = self.frame.iloc[number]
            return torch.tensor([row["user"] % 1000, row["item"] % 1000])

    model = nn.EmbeddingBag(1000, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in DataLoader(Rows(), 64):
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    """,
    "iloc[number]", {"self.frame.iloc[number]": '{"user": number, "item": number}'}, "input",
)  # fmt: skip
planted(
    "a softmax over 50,000 items", "catalogue softmax",
    """
    ITEMS = 50_000
    table, tower = nn.Embedding(ITEMS, 16), nn.Linear(16, 16)
    optimizer = torch.optim.SGD([*table.parameters(), *tower.parameters()], lr=0.01)
    for step in range(STEPS):
        ids, target = torch.randint(ITEMS, (2, 64))
        hidden = tower(table(ids))
        scores = hidden @ table.weight.T
        loss = F.cross_entropy(scores, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    """,
    "hidden @ table.weight",
    {"scores = hidden @ table.weight.T": "items = torch.cat([target, torch.randint(ITEMS, (512,))])",
     "F.cross_entropy(scores, target)": "F.cross_entropy(hidden @ table(items).T, torch.arange(64))"},
    "bandwidth", "compute", "cache", "operator", same=False,
)  # fmt: skip
planted(
    "8 workers on 2 cores", "workers",
    """
    batches = torch.randint(1000, (STEPS, 64, 2))
    model = nn.EmbeddingBag(1000, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(batches, batch_size=None, num_workers=8)
    for batch in loader:
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    """,
    "for batch in loader", {"num_workers=8": "num_workers=0"}, "input", edit=False,
)  # fmt: skip
planted(
    "an activation as a formula", "activation",
    """
    import math
    class Activation(nn.Module):
        def forward(self, x):
            return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))

    model = nn.Sequential(nn.Linear(64, 512), Activation(), nn.Linear(512, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.rand(1024, 64)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    """,
    "0.5 * x", {"0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))":
                'F.gelu(x, approximate="tanh")'},
    "cache", "bandwidth", "operator",
)  # fmt: skip
planted(
    "a layer norm of four statements", "layer norm",
    """
    class Norm(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        def forward(self, x):
            mean = x.mean(-1, keepdim=True)
            variance = (x - mean).pow(2).mean(-1, keepdim=True)
            x = (x - mean) / torch.sqrt(variance + 1e-12)
            return self.weight * x + self.bias

    model = nn.Sequential(nn.Linear(32, 256), Norm(256), nn.Linear(256, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.rand(1024, 32)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    """,
    "variance = ",
    {"mean = x.mean(-1, keepdim=True)": "return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, 1e-12)"},
    "cache", "bandwidth", "operator",
)  # fmt: skip
planted(
    "windows stacked one by one", "windows",
    """
    data = torch.randint(1000, (100_000,))
    table, out = nn.Embedding(1000, 8), nn.Linear(8, 1)
    optimizer = torch.optim.SGD([*table.parameters(), *out.parameters()], lr=0.01)
    for step in range(STEPS):
        ids = torch.randint(len(data) - 17, (256,))
        x = torch.stack([data[i : i + 16] for i in ids])
        y = torch.stack([data[i + 1 : i + 1 + 16] for i in ids])
        loss = (out(table(x)).squeeze(2) - y / 1000).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    """,
    "data[i : i + 16]",
    {"torch.stack([data[i : i + 16] for i in ids])": "data[ids[:, None] + torch.arange(16)]",
     "torch.stack([data[i + 1 : i + 1 + 16] for i in ids])": "data[ids[:, None] + torch.arange(1, 17)]"},
    "dispatch", "python", "operator",
)  # fmt: skip
planted(
    "attention that returns its weights", "attention",
    """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList()
            self.layers.append(nn.MultiheadAttention(32, 2))
        def forward(self, x):
            for i in range(len(self.layers)):
                out, _ = self.layers[i](x, x, x)
                x = x + out
            return x

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.rand(200, 16, 32)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    """,
    "out, _ =", {"(x, x, x)": "(x, x, x, need_weights=False)"}, "cache", "bandwidth", "operator", "compute",
)  # fmt: skip
