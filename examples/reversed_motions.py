"""Play the motions backwards: a model that uses time takes left for right, up for down, in for out.

python examples/reversed_motions.py runs/motions
"""

import argparse

import torch

from saccade.data.synthetic.motions import MOTIONS, MotionSet
from saccade.data.transforms.batch import normalize
from saccade.models.card import open_model

OPPOSITE = {"left": "right", "up": "down", "zoom in": "zoom out"}
OPPOSITE |= {there: here for here, there in OPPOSITE.items()} | {"rotate": "rotate", "still": "still"}


@torch.inference_mode()
def answers(model: torch.nn.Module, clips: torch.Tensor, mean: tuple, std: tuple) -> list[str]:
    return [MOTIONS[i] for i in model(normalize(clips.float() / 255, mean, std)).argmax(1).tolist()]


def main() -> None:
    parser = argparse.ArgumentParser(description="What a run on the motions says of clips played backwards.")
    parser.add_argument("run", help="a run's folder or its weights")
    parser.add_argument("--clips", type=int, default=128, help="of every class")
    args = parser.parse_args()
    try:
        model, card = open_model(args.run)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    about = card.preprocess
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device)
    source = MotionSet(len(MOTIONS) * args.clips, about.size, about.frames, "test").to(device)
    print("| motion | answered so | played backwards, answered as its opposite |\n|---|---|---|")
    for number, motion in enumerate(MOTIONS):
        right = swapped = 0
        for chunk in range(0, args.clips, 32):
            places = range(chunk, min(chunk + 32, args.clips))
            clips = source.clips([number + len(MOTIONS) * i for i in places])
            right += answers(model, clips, about.mean, about.std).count(motion)
            swapped += answers(model, clips.flip(2), about.mean, about.std).count(OPPOSITE[motion])
        print(f"| {motion} | {100 * right / args.clips:.1f} % | {100 * swapped / args.clips:.1f} % |")


if __name__ == "__main__":
    main()
