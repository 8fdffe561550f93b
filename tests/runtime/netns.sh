#!/bin/bash
# Two machines in one: two network namespaces joined by a cable, a Ray node in each.
#
#   netns.sh up FOLDER | netns.sh run COMMAND... (on the first machine) | netns.sh down
set -u
A=strop-a B=strop-b
export RAY_AUTH_MODE=disabled RAY_USAGE_STATS_ENABLED=0

down() {
    for space in $A $B; do
        for process in $(ip netns pids "$space" 2>/dev/null); do kill -9 "$process" 2>/dev/null; done
        ip netns del "$space" 2>/dev/null
    done
}

up() {
    down
    { ip netns add $A && ip netns add $B && ip link add veth0 netns $A type veth peer name veth0 netns $B; } || return 1
    ip -n $A addr add 10.99.7.1/24 dev veth0 && ip -n $B addr add 10.99.7.2/24 dev veth0
    for space in $A $B; do ip -n "$space" link set lo up && ip -n "$space" link set veth0 up; done
    ip netns exec $A ray start --head --node-ip-address=10.99.7.1 --port=6399 --num-cpus=1 --include-dashboard=false \
        --object-store-memory="${STORE:-100000000}" --temp-dir="$1/ray-a" || return 1
    ip netns exec $B ray start --address=10.99.7.1:6399 --node-ip-address=10.99.7.2 --num-cpus=1 \
        --object-store-memory="${STORE:-100000000}" --temp-dir="$1/ray-b"
}

case $1 in
up) up "$2" ;;
run) shift && exec ip netns exec $A "$@" ;;
down) down ;;
esac
