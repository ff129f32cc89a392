#!/bin/sh
# Runs the federation of this folder on one machine: run.sh FOLDER [PORT]
set -eu

here=$(cd "$(dirname "$0")" && pwd)
folder=${1:?name a folder that is not there yet: run.sh FOLDER [PORT]}
port=${2:-8002}
sites="alder birch cedar"

mkdir "$folder"
cd "$folder"
cp "$here"/*.yaml .

running=""
stop() {
    trap - EXIT INT TERM
    # shellcheck disable=SC2086 # a list of numbers
    [ -z "$running" ] || kill $running 2>/dev/null || true
    wait
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

echo "Images for three hospitals: $folder/images"
collegium phantoms images --sites 3 --cases 12 --size 64 >phantoms.log

echo "Start-up kits: $folder/kits"
collegium federation init kits --server localhost --port "$port" \
    --site alder --site birch --site cedar >kits.log

echo "Server and sites; logs: $folder/*.log"
collegium server start kits/server >server.log 2>&1 &
running="$running $!"
for site in $sites; do
    collegium site start "$site.yaml" --kit "kits/sites/$site" >"$site.log" 2>&1 &
    running="$running $!"
done

echo "The sites are asked for an experiment that they have not accepted:"
collegium run experiment.yaml && exit 1
for site in $sites; do
    digest=$(collegium site experiments "$site.yaml" | awk '/ waits / { print $1 }')
    collegium site accept "$site.yaml" "$digest"
    echo "$site accepted $digest"
done

collegium run experiment.yaml
collegium status kits
for site in $sites; do collegium site ledger "$site.yaml"; done
echo "Stopping; the report is $folder/runs/example/report.html"
