"""Compares /app/revenue.json with the expected sums, to the cent."""

import json
import sys

EXPECTED = {
    "2024-01": {"north": 1470.49, "south": 75.0},
    "2024-02": {"north": 154.9, "south": 2726.0},
    "2024-03": {"south": 380.05},
}


def main():
    with open("/app/revenue.json", encoding="utf-8") as file:
        found = json.load(file)
    print("expected", EXPECTED)
    print("found   ", found)
    return 0 if cents(found) == cents(EXPECTED) else 1


def cents(table):
    """The sums in whole cents; a sum that is off by a fraction of one stays different."""
    return {month: {region: round(value * 100, 6) for region, value in regions.items()} for month, regions in table.items()}


if __name__ == "__main__":
    sys.exit(main())
