"""A program that writes a data set to a JSON Lines file. Arguments: name, split, source file or "", target file."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from datasets import load_dataset

    name, split, file, target = sys.argv[1:]
    load_dataset(name, split=split, data_files=file or None).to_json(target)
