#!/usr/bin/env bash
set -euo pipefail

echo 'Hello, harbor!' > /app/greeting.txt
