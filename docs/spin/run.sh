#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Usage: docs/spin/run.sh -DSLOTS=2 -DWORDS=1 -DCALLS=4 ...   (needs spin 6.5 and gcc; the switches are in mailbox.pml)
# Prints spin's verdict: "errors: 0" (no failure), an assertion (STALE) or an invalid end state (LOST or DEADLOCK).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
cp "$here/mailbox.pml" "$build"
cd "$build"
spin "$@" -a mailbox.pml >spin.log || { cat spin.log; exit 1; }
gcc -O2 -w -DSAFETY -DNOREDUCE -o pan pan.c
./pan -m1000000 -w24 | grep -E "^pan:1|errors:|states, stored" | sort -u
