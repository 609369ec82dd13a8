"""A program that writes a data set to a JSON Lines file, with the library `datasets`.

Its arguments are the name, the split, the source file (or an empty string), and the target file.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from datasets import load_dataset

    name, split, file, target = sys.argv[1:]
    load_dataset(name, split=split, data_files=file or None).to_json(target)
