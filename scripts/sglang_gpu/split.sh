#!/usr/bin/env bash
# Divides the archives in PACKED into PIECES/1/piece.1-of-N, PIECES/2/piece.2-of-N and so on.
#
#   split.sh PACKED PIECES          PIECE_MIB is the greatest size of one, 28 by default
set -euo pipefail

packed=$1
pieces=$2
rm -rf "$pieces"/[0-9]*
tar -C "$packed" --sort=name -cf - . | split --bytes "${PIECE_MIB:-28}M" --numeric-suffixes=1 --suffix-length 2 - "$pieces/part-"
count=$(find "$pieces" -maxdepth 1 -name 'part-*' | wc -l)
for number in $(seq "$count"); do
    mkdir "$pieces/$number"
    mv "$pieces/part-$(printf %02d "$number")" "$pieces/$number/piece.$number-of-$count"
done
du -sh "$pieces"/*
