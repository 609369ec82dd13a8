#!/usr/bin/env bash
set -euo pipefail

cd /app
awk '$(NF - 1) >= 500' access.log > errors.txt
awk '{ bytes[$1] += $NF } END { for (client in bytes) print client, bytes[client] }' access.log \
  | sort -k2,2nr > clients.txt
