#!/usr/bin/env bash
set -euo pipefail

python3 -B - <<'PYTHON'
import csv
import json
from collections import defaultdict
from decimal import Decimal

SIGN = {"paid": 1, "refunded": -1, "cancelled": 0}


def month(date):
    if "." in date:
        day, month, year = date.split(".")
        return f"{year}-{month}"
    return date[:7]


seen = set()
revenue = defaultdict(lambda: defaultdict(Decimal))
for shop in ("north", "south"):
    with open(f"/app/data/{shop}.csv", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            sign = SIGN[row["status"]]
            if row["order_id"] in seen or sign == 0:
                continue
            seen.add(row["order_id"])
            amount = Decimal(row["amount"].replace("€", "").replace(",", ""))
            revenue[month(row["date"])][row["region"].strip().lower()] += sign * amount

table = {month: {region: round(float(total), 2) for region, total in regions.items()} for month, regions in revenue.items()}
with open("/app/revenue.json", "w", encoding="utf-8") as file:
    json.dump(table, file, indent=2, sort_keys=True)
PYTHON
