#!/usr/bin/env bash
# Runs pytest, and once more, one at a time, the tests that failed: a test that needs a quieter machine passes then, and a
# defect fails again.
#
#   pytest-twice.sh PYTHON [ARGUMENTS OF PYTEST]
#
# Ends with the status of the second run, and names the tests that passed in it only: each of them is a defect of the test or
# of Baton that somebody has to look at. More than MOST failures are not a matter of a busy machine: there is no second run.
set -uo pipefail
MOST=12
cache=$(mktemp -d)
trap 'rm -rf "$cache"' EXIT

"$1" -m pytest -o cache_dir="$cache" "${@:2}"
status=$?
failed=$cache/v/cache/lastfailed
[ $status -eq 1 ] && [ -f "$failed" ] || exit $status

cp "$failed" "$cache/first"
count=$(grep -c ': true' "$cache/first")
if [ "$count" -gt $MOST ]; then
    echo "$count tests failed: no second run for more than $MOST"
    exit $status
fi
echo "Second run, of the tests that failed: $count"
"$1" -m pytest -o cache_dir="$cache" "${@:2}" --numprocesses 0 --last-failed --last-failed-no-failures none
status=$?
if [ $status -eq 0 ]; then
    echo "Passed in the second run only:"
    sed -n 's/^ *"\(.*\)": true,\{0,1\}$/  \1/p' "$cache/first"
fi
exit $status
