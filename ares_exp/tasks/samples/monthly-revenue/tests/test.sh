#!/usr/bin/env bash
# Reward 1 when /app/revenue.json holds the expected sums, else 0.

if python3 -I -B /tests/grade.py; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
