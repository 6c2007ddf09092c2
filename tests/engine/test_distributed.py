"""Two processes started by torchrun, with gloo on the CPU: killed, resumed, and equal to one process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from saccade.engine.recipe import RecipeError, load_recipe
from saccade.engine.train import assemble, train, trainer_options, with_launcher
from tests.engine.runs import arguments, recipe, rows

ROOT = Path(__file__).parents[2]

# Statistics of batch norms are per process, so they are frozen; 25 validation images on 2 processes are 13 and 12, in
# batches of 5: three and three; with 21: 11 and 10, three and two.
CHANGES = ["epochs=4", "trainer.save_every=2", "trainer.accumulate=2", "augment.crop=pad", "ema.decay=0.5",
           "optimizer.name=sgd", "optimizer.lr=0.1", "optimizer.clip_grad=1.0", "data.cache=false", "data.scenes=84",
           "regularize.freeze_norm=true"]  # fmt: skip


def torchrun(module: str, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", module]
    return subprocess.run(
        [*command, *words], env=environment, capture_output=True, text=True, timeout=900, start_new_session=True
    )


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_killed_and_resumed_processes_match_one_process(strategy, tmp_path):
    """The same images, gradients, averages and weights as one process with the full batch.

    Both are float32, but one averages 10 gradients and the other two means of 5: they differ by rounding, which 16
    steps amplify, hence 1e-5 absolute and 1e-4 relative; a missing or repeated step changes weights by 1e-3.
    """
    words = [
        *arguments(*CHANGES, f"trainer.strategy={strategy}"),
        "--out",
        str(tmp_path / "two"),
        "--resume",
        "--quiet",
    ]
    killed = torchrun("tests.engine.signal_run", "SIGKILL", "step", "7", *words)
    assert killed.returncode != 0
    assert torch.load(tmp_path / "two/last.ckpt", weights_only=True)["saccade"]["steps"] == 6, killed.stderr
    resumed = torchrun("saccade.cli", "train", *words)
    assert resumed.returncode == 0, resumed.stderr
    one = train(recipe(*CHANGES), tmp_path / "one", progress=False)
    assert [row["step"] for row in rows(tmp_path / "two")] == [row["step"] for row in rows(one.out)]
    initial = assemble(recipe(*CHANGES)).model.state_dict()
    for name in ("last", "best"):
        ours, theirs = load_file(one.out / f"{name}.safetensors"), load_file(tmp_path / f"two/{name}.safetensors")
        torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=1e-4)
        change = max(float((ours[key] - initial[key]).abs().max()) for key in ours if key.endswith("weight"))
        assert change > 1e-3, "the weights must have changed"


@pytest.mark.slow
def test_processes_close_their_group_before_they_end(tmp_path):
    words = [*arguments("epochs=1", "data.scenes=40"), "--out", str(tmp_path / "run"), "--quiet"]
    done = torchrun("tests.engine.group_run", *words)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("group open: False") == 2, done.stderr
    assert (tmp_path / "run/result.json").is_file()


def test_torchrun_sets_the_number_of_processes(monkeypatch):
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    trainer = with_launcher(load_recipe(None)).trainer
    assert (trainer.devices, trainer.num_nodes) == (4, 2)


def test_fsdp2_is_data_parallelism_only():
    strategy = trainer_options(load_recipe(None, ["trainer.strategy=fsdp2", "trainer.devices=4"]), "cpu")["strategy"]
    assert (strategy._data_parallel_size, strategy._tensor_parallel_size) == (4, 1)  # Lightning's default is (1, 4)
    assert not strategy._save_distributed_checkpoint, "one file, which the checkpointer renames"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["trainer.strategy=fsdp", "ema.decay=0.9"], r"ema\.decay needs ddp or fsdp2, got trainer\.strategy=fsdp"),
        (["trainer.strategy=fsdp2", "trainer.devices=auto"], r"fsdp2 needs a number in trainer\.devices, got auto"),
        (["trainer.strategy=fsdp2", "trainer.precision=16-mixed"], "fsdp2 supports 32-true and bf16-mixed"),
    ],
)
def test_unsupported_sharding_is_refused(changes, words):
    with pytest.raises(RecipeError, match=words):
        load_recipe(None, changes)
