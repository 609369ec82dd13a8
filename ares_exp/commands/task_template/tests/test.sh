#!/usr/bin/env bash
# Computes the reward. It runs in the agent's container when the agent is done. Only then is this folder copied to /tests.
# The reward is one number in /logs/verifier/reward.txt, or {"reward": 1, "speed": 0.3} in reward.json.
# The output of this script is stored as verifier/test-stdout.txt.

expected=12
found=$(cat /app/sum.txt)
echo "expected $expected, found ${found:-nothing}"

if [ "$found" = "$expected" ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
