"""
Load the authors' checkpoint and reproduce a number
===================================================

``saccade.load_checkpoint`` recognises the authors' files by their keys, converts them and loads them strictly. The
repository has no released weights, but it has a *parity kit* per model (``tests/parity``): the names and shapes of the
authors' tensors, a rule that fills them, and the outputs that the authors' code computed with them in float64.
"""

# %%
# The authors' state dict of SViT-S: their names, not ours.
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch

import saccade

sys.path.insert(0, str(Path(saccade.__file__).parents[1]))
from tests.parity import kit

official = kit.weights("stvit_small")
print(len(official), "tensors:", *list(official)[:3], "…")

# %%
# As a file, in the layout that the authors released.
path = Path(tempfile.mkdtemp()) / "stvit-small.pth"
torch.save({"model": official}, path)
model = saccade.create_model("svit_small")
print(saccade.load_checkpoint(model, path))

# %%
# The numbers: logits of the authors' implementation on the same images, and ours.
model = model.double().eval()
with torch.no_grad():
    logits = model(kit.images("160x256"))
expected = kit.golden("stvit_small")["logits/160x256"]
print(f"largest difference / largest logit: {kit.error(logits, expected):.1e}")

figure, axis = plt.subplots(figsize=(4, 4))
axis.plot(expected[0], logits[0], ".", markersize=3)
axis.set(xlabel="logits of the authors' code", ylabel="logits of saccade", title="SViT-S, 1000 classes, float64")
figure.tight_layout()

# %%
# Parameters and multiply-adds are those of the paper (25 M, 4.4 G).
cost = saccade.count(saccade.create_model("svit_small"), size=224)
print(f"{cost.params / 1e6:.1f} M parameters, {cost.madds / 1e9:.2f} G multiply-adds")
