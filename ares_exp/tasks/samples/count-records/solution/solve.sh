#!/usr/bin/env bash
set -euo pipefail

python3 -B - <<'PYTHON'
import csv

with open("/app/feedback.csv", encoding="utf-8", newline="") as file:
    count = sum(int(record["rating"]) >= 4 for record in csv.DictReader(file))
with open("/app/answer.txt", "w", encoding="utf-8") as file:
    file.write(f"{count}\n")
PYTHON
