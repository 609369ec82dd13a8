#!/usr/bin/env bash
# Reward 1 when /app/answer.txt holds the right number, else 0. White space around it does not matter.

answer=$(tr -d '[:space:]' < /app/answer.txt)
echo "answer: $answer"
if [ "$answer" = 6 ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
