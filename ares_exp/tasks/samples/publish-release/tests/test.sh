#!/usr/bin/env bash
# Reward 1 when all five parts of the release are right, else 0.

version=1.4.0
releases=/app/releases
archive=site-$version.tar.gz
unpacked=$(mktemp -d)

check() { # check <what> <command...>
  local what=$1
  shift
  if "$@"; then echo "ok: $what"; else echo "WRONG: $what"; reward=0; fi
}

archive_matches() {
  tar -xzf "$releases/$archive" -C "$unpacked" && [ "$(ls -A "$unpacked")" = "$version" ] \
    && diff -r /tests/expected "$unpacked/$version"
}

checksums_match() {
  grep -Eq "^[0-9a-f]{64} [ *]$archive\$" "$releases/SHA256SUMS" && (cd "$releases" && sha256sum -c SHA256SUMS)
}

link_points_there() {
  [ -L /app/current ] && [ "$(readlink -f /app/current)" = "$(readlink -f "$releases/$version")" ]
}

reward=1
check 'the copy' diff -r /tests/expected "$releases/$version"
check 'the original is untouched' diff -r /tests/site /app/site
check 'the archive' archive_matches
check 'the checksums' checksums_match
check 'the link' link_points_there
rm -rf "$unpacked"
echo "$reward" > /logs/verifier/reward.txt
