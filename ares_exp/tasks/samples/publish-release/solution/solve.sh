#!/usr/bin/env bash
set -euo pipefail

release="/app/releases/$RELEASE_VERSION"
cp -r /app/site "$release"
find "$release" -name '*.tmp' -delete
find "$release" -name '*.html' -exec sed -i "s/@VERSION@/$RELEASE_VERSION/g" {} +
cd /app/releases
tar -czf "site-$RELEASE_VERSION.tar.gz" "$RELEASE_VERSION"
sha256sum "site-$RELEASE_VERSION.tar.gz" > SHA256SUMS
ln -sfn "$release" /app/current
