#!/usr/bin/env bash
# Reward 1 when /app/greeting.txt equals the expected file byte for byte, else 0.

if [ ! -L /app/greeting.txt ] && cmp /tests/expected.txt /app/greeting.txt; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
