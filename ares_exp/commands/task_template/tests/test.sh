#!/usr/bin/env bash
# Gives the reward. It runs when the agent is done, in its container; this folder is /tests, and was not there before.
# The reward is one number in /logs/verifier/reward.txt, or {"reward": 1, "speed": 0.3} in reward.json.
# What is printed is kept as verifier/test-stdout.txt.

expected=12
found=$(cat /app/sum.txt)
echo "expected $expected, found ${found:-nothing}"

if [ "$found" = "$expected" ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
