"""Classify motions played backwards: a model that uses time predicts the opposite motion.

python examples/reversed_motions.py runs/motions
"""

import argparse

import torch

import saccade
from saccade.data import MOTIONS, MotionSet, normalize

OPPOSITE = {"left": "right", "up": "down", "zoom in": "zoom out"}
OPPOSITE |= {second: first for first, second in OPPOSITE.items()} | {"rotate": "rotate", "still": "still"}


@torch.inference_mode()
def predict(model: torch.nn.Module, clips: torch.Tensor, mean: tuple, std: tuple) -> list[str]:
    return [MOTIONS[i] for i in model(normalize(clips.float() / 255, mean, std)).argmax(1).tolist()]


def main() -> None:
    parser = argparse.ArgumentParser(description="Evaluate a run on the motions with clips played backwards.")
    parser.add_argument("run", help="a run folder or checkpoint")
    parser.add_argument("--clips", type=int, default=128, help="clips per class")
    args = parser.parse_args()
    try:
        model = saccade.load(args.run)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    preprocess = model.card.preprocess
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device)
    source = MotionSet(len(MOTIONS) * args.clips, preprocess.size, preprocess.frames, "test").to(device)
    print("| motion | correct | played backwards, predicted as the opposite |\n|---|---|---|")
    for number, motion in enumerate(MOTIONS):
        correct = opposite = 0
        for chunk in range(0, args.clips, 32):
            positions = range(chunk, min(chunk + 32, args.clips))
            clips = source.clips([number + len(MOTIONS) * i for i in positions])
            correct += predict(model, clips, preprocess.mean, preprocess.std).count(motion)
            opposite += predict(model, clips.flip(2), preprocess.mean, preprocess.std).count(OPPOSITE[motion])
        print(f"| {motion} | {100 * correct / args.clips:.1f} % | {100 * opposite / args.clips:.1f} % |")


if __name__ == "__main__":
    main()
