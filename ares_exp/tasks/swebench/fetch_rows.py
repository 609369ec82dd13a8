"""A program that writes a data set of the Hugging Face hub to a JSON Lines file. Arguments: name, split, file."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from datasets import load_dataset

    name, split, target = sys.argv[1:]
    load_dataset(name, split=split).to_json(target)
