"""PaCa-ViT written down from the paper's equations, on the authors' tensors under the authors' names.

The reference for variants no parity kit covers: `official_keys` spells their state dict, `forward` computes it.
Both are checked against the three kits first.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

TINY = dict(dims=(96, 192, 320, 384), depths=(2, 2, 4, 2), heads=(2, 4, 8, 16), clusters=(100, 100, 100, 0))
VARIANTS = {
    "pacavit_tiny_p2cconv_100_0": TINY,
    "pacavit_small_p2cmlp_100_0": TINY | dict(depths=(3, 3, 10, 3), clustering="mlp"),
    "pacavit_convmixer_small_100": TINY | dict(depths=(3, 3, 7, 3), clusters=(100,) * 4, teacher=(2, 2, 2, 2)),
}


def official_keys(dims, depths, clusters, clustering="conv", every=0, teacher=None, classes=1000, heads=None) -> list:
    """Rows [name, shape, dtype, kind] of the official state dict; `every` blocks share an assignment, 0: all."""
    rows: list = []

    def add(name, *shape, kind="param", dtype="float32"):
        rows.append([name, list(shape), dtype, kind])

    def layer(name, *shape, bias=True):
        add(f"{name}.weight", *shape)
        if bias:
            add(f"{name}.bias", shape[0])

    def batch_norm(name, dim):
        layer(name, dim)
        add(f"{name}.running_mean", dim, kind="buffer")
        add(f"{name}.running_var", dim, kind="buffer")
        add(f"{name}.num_batches_tracked", kind="buffer", dtype="int64")

    def mixer(name, dim):
        layer(f"{name}.0.fn.0", dim, 1, 7, 7)
        batch_norm(f"{name}.0.fn.2", dim)
        layer(f"{name}.1", dim, dim, 1, 1)
        batch_norm(f"{name}.3", dim)

    if teacher:
        for i, (dim, depth) in enumerate(zip(dims, teacher, strict=True), start=1):
            for j in range(depth):
                mixer(f"paca_teacher.block{i}.{j}", dim)
            if i < len(dims):
                add(f"paca_teacher.transition{i}.0.blur_filter", dim, 1, 3, 3, kind="buffer")
                layer(f"paca_teacher.transition{i}.0.conv", dims[i], dim, 3, 3)
                batch_norm(f"paca_teacher.transition{i}.2", dims[i])
                layer(f"paca_teacher.lateral{i}.0", dim, dims[i], 1, 1)
                batch_norm(f"paca_teacher.lateral{i}.2", dim)
                mixer(f"paca_teacher.fpn{i}", dim)
            layer(f"paca_teacher.to_clusters{i}", clusters[i - 1], dim, 1, 1)
    layer("patch_embed.proj.0", dims[0] // 2, 3, 3, 3)
    layer("patch_embed.proj.1", dims[0], dims[0] // 2, 3, 3)
    layer("patch_embed.norm", dims[0])
    for i, (dim, depth, number) in enumerate(zip(dims, depths, clusters, strict=True), start=1):
        for j in range(depth):
            block = f"stage{i}.{j}"
            layer(f"{block}.norm1_before", dim)
            if number:
                layer(f"{block}.attn.cluster_norm", dim)
                scorer = f"{block}.attn.clustering.clustering"
                if teacher is None and (j % every if every else j) == 0:
                    if clustering == "conv":
                        layer(f"{scorer}.0", dim, 1, 7, 7)
                        layer(f"{scorer}.2", dim, dim, 1, 1)
                        layer(f"{scorer}.4", number, dim, 1, 1, bias=False)
                    else:
                        layer(f"{scorer}.0", 4 * dim, dim)
                        layer(f"{scorer}.2", number, 4 * dim)
            for part in ("q", "k", "v", "proj"):
                layer(f"{block}.attn.{part}", dim, dim)
            layer(f"{block}.norm2_before", dim)
            layer(f"{block}.mlp.fc1", 4 * dim, dim)
            layer(f"{block}.mlp.dwconv.dwconv", 4 * dim, 1, 3, 3)
            layer(f"{block}.mlp.fc2", dim, 4 * dim)
        layer(f"norm{i}", dim)
        if i < len(dims):
            layer(f"transition{i}.proj", dims[i], dim, 3, 3)
            layer(f"transition{i}.norm", dims[i])
    layer("head", classes, dims[-1])
    return rows


class Official:
    """The authors' tensors, and the few layers PaCa is made of, by name."""

    def __init__(self, tensors: dict[str, Tensor]):
        self.tensors = tensors

    def has(self, name):
        return f"{name}.weight" in self.tensors

    def pair(self, name):
        return self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias")

    def linear(self, name, x):
        return F.linear(x, *self.pair(name))

    def conv(self, name, x, stride=1):
        weight, bias = self.pair(name)
        return F.conv2d(x, weight, bias, stride, weight.shape[-1] // 2, groups=x.shape[1] // weight.shape[1])

    def layer_norm(self, name, x):
        weight, bias = self.pair(name)
        return F.layer_norm(x, weight.shape, weight, bias, 1e-6)

    def map_norm(self, name, x):
        return self.layer_norm(name, x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    def batch_norm(self, name, x):
        running = [self.tensors[f"{name}.running_{which}"] for which in ("mean", "var")]
        return F.batch_norm(x, *running, *self.pair(name))

    def mixer(self, name, x):
        x = x + self.batch_norm(f"{name}.0.fn.2", F.gelu(self.conv(f"{name}.0.fn.0", x)))
        return self.batch_norm(f"{name}.3", F.gelu(self.conv(f"{name}.1", x)))

    def teach(self, x, depths):
        """The stem's map -> the scores of every stage (B, M, N), and its maps bottom-up."""
        maps, count = [], len(depths)
        for i, depth in enumerate(depths, start=1):
            for j in range(depth):
                x = self.mixer(f"paca_teacher.block{i}.{j}", x)
            maps.append(x)
            if i < count:
                blur = self.tensors[f"paca_teacher.transition{i}.0.blur_filter"]
                x = F.conv2d(x, blur, padding=1, groups=len(blur))
                x = F.gelu(self.conv(f"paca_teacher.transition{i}.0.conv", x, stride=2))
                x = self.batch_norm(f"paca_teacher.transition{i}.2", x)
        levels = [maps[-1]]
        for i in range(count - 1, 0, -1):
            x = F.interpolate(levels[0], maps[i - 1].shape[2:], mode="bilinear", align_corners=False)
            x = self.batch_norm(f"paca_teacher.lateral{i}.2", F.gelu(self.conv(f"paca_teacher.lateral{i}.0", x)))
            levels.insert(0, self.mixer(f"paca_teacher.fpn{i}", maps[i - 1] + x))
        scores = [self.conv(f"paca_teacher.to_clusters{i}", x).flatten(2) for i, x in enumerate(levels, start=1)]
        return scores, maps

    def scores(self, name, features, pixels):
        """Eqs. 4-6 before the softmax: (B, M, N)."""
        if self.has(f"{name}.4"):
            hidden = F.gelu(self.conv(f"{name}.2", F.gelu(self.conv(f"{name}.0", features))))
            return self.conv(f"{name}.4", hidden).flatten(2)
        return self.linear(f"{name}.2", F.gelu(self.linear(f"{name}.0", pixels))).transpose(1, 2)

    def attention(self, name, pixels, assignment, heads):
        """Eqs. 1-2, head by head."""
        source = pixels
        if assignment is not None:
            source = self.layer_norm(f"{name}.cluster_norm", torch.einsum("bmn,bnc->bmc", assignment, pixels))
        query = self.linear(f"{name}.q", pixels).chunk(heads, -1)
        key = self.linear(f"{name}.k", source).chunk(heads, -1)
        value = self.linear(f"{name}.v", source).chunk(heads, -1)
        mixed = [
            (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).softmax(-1) @ v
            for q, k, v in zip(query, key, value, strict=True)
        ]
        return self.linear(f"{name}.proj", torch.cat(mixed, -1))


def forward(tensors: dict[str, Tensor], images: Tensor, depths, heads, clusters, teacher=None, **_) -> Tensor:
    """images (B, 3, H, W) -> logits (B, K)."""
    net = Official(tensors)
    x = net.conv("patch_embed.proj.1", net.conv("patch_embed.proj.0", images, 2), 2)
    x = net.map_norm("patch_embed.norm", x)
    given, maps = net.teach(x, teacher) if teacher else ([], [])
    for i, (depth, number_of_heads) in enumerate(zip(depths, heads, strict=True), start=1):
        assignment = given[i - 1].softmax(-1) if teacher else None
        for j in range(depth):
            block, grid = f"stage{i}.{j}", x.shape[2:]
            normed = net.map_norm(f"{block}.norm1_before", x)
            pixels = normed.flatten(2).transpose(1, 2)
            if net.has(f"{block}.attn.clustering.clustering.0"):
                assignment = net.scores(f"{block}.attn.clustering.clustering", normed, pixels).softmax(-1)
            shared = assignment if clusters[i - 1] else None
            mixed = net.attention(f"{block}.attn", pixels, shared, number_of_heads)
            x = x + mixed.transpose(1, 2).unflatten(2, grid)
            hidden = net.linear(f"{block}.mlp.fc1", net.map_norm(f"{block}.norm2_before", x).permute(0, 2, 3, 1))
            hidden = hidden.permute(0, 3, 1, 2)
            hidden = F.gelu(hidden + net.conv(f"{block}.mlp.dwconv.dwconv", hidden))
            x = x + net.linear(f"{block}.mlp.fc2", hidden.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        x = net.map_norm(f"norm{i}", x + maps[i - 1] if teacher else x)
        if i < len(depths):
            x = net.map_norm(f"transition{i}.norm", net.conv(f"transition{i}.proj", x, 2))
    return net.linear("head", x.mean((2, 3)))
