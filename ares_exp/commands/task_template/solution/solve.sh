#!/usr/bin/env bash
# The reference solution. It shows that the tests can be passed. Agents never see this folder.
set -euo pipefail

sum=0
while read -r number; do
  sum=$((sum + number))
done < /app/numbers.txt
echo "$sum" > /app/sum.txt
