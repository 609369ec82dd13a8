#!/usr/bin/env bash
# Writes reward.json: half a point for each report that equals the expected one.

score() { # score <report>: prints 1 or 0
  if [ ! -L "/app/$1" ] && cmp "/tests/expected/$1" "/app/$1" >&2; then echo 1; else echo 0; fi
}

errors=$(score errors.txt)
clients=$(score clients.txt)
case $((errors + clients)) in
  2) reward=1.0 ;;
  1) reward=0.5 ;;
  *) reward=0.0 ;;
esac
echo "{\"reward\": $reward, \"errors\": $errors, \"clients\": $clients}" > /logs/verifier/reward.json
