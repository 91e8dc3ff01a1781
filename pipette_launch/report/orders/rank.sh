#!/bin/sh
# Written by pipette order: runs a command as the rank of this process's slot.
nth() { shift "$1" && [ -n "$1" ] && printf %s "$1"; }
node=@NODE@
case $node in
@HOSTS@
*) echo "rank.sh: the plan has no host $node" >&2; exit 2 ;;
esac
slot=$((${@SLOT@:?is not set, so this is not the launcher of this rank.sh} + 1))
RANK=$(nth $slot $ranks) && LOCAL_RANK=$(nth $slot $locals) || {
    echo "rank.sh: the plan has no process $slot on $node" >&2; exit 2; }
export RANK LOCAL_RANK WORLD_SIZE=@WORLD@ LOCAL_WORLD_SIZE=@SIZE@
@EXPORTS@exec "$@"
