#!/usr/bin/env bash
# Train on several hosts with torchrun alone: run this on each host.
#
#     HEAD=host0 HOSTS=4 NPROC=8 examples/launch/torchrun.sh examples/finetune.py \
#         --checkpoint-dir /shared/checkpoints --save-every 100 --resume auto
#
# HEAD       name or address of the host that all others reach; it must be up before ranks start
# HOSTS      number of hosts (2), or a range such as 3:4, with which training goes on at 3
# NPROC      ranks on this host (1)
# PORT       port on HEAD for the rendezvous (29500)
# TRIES      starts of torchrun on this host (100): it ends where the network to HEAD is cut. A script that
#            fails at once is started again, too: try a new one with TRIES=1.
# ADDRESS    address of this host; for hosts whose own name does not lead the others to them
# PYTHON     the Python that runs torchrun; without it, the torchrun in PATH
# RDZV_CONF  more settings of the rendezvous, such as read_timeout=20
set -euo pipefail

: "${HEAD:?expected the name or address of the first host}"
conf="${RDZV_CONF:-}"
address=()
if [[ -n "${ADDRESS:-}" ]]; then
    address=(--local-addr "$ADDRESS")
    [[ "$ADDRESS" == "$HEAD" ]] && is_head=1 || is_head=0
    conf="is_host=$is_head${conf:+,$conf}"
fi
torchrun=(torchrun)
[[ -n "${PYTHON:-}" ]] && torchrun=("$PYTHON" -m torch.distributed.run)
stopped=0
trap 'stopped=1; kill "$child" 2>/dev/null || true' TERM INT
for ((try = 1; try <= ${TRIES:-100}; try++)); do
    ((try == 1)) || sleep 2
    "${torchrun[@]}" --nnodes "${HOSTS:-2}" --nproc-per-node "${NPROC:-1}" \
        --rdzv-backend c10d --rdzv-id "${RUN_ID:-zeroshard}" --rdzv-endpoint "$HEAD:${PORT:-29500}" \
        --rdzv-conf "$conf" "${address[@]}" --max-restarts 3 "$@" &
    child=$!
    wait "$child" && exit 0
    ((stopped)) && exit 143
    echo "torchrun.sh: start $try of torchrun has ended with an error" >&2
done
exit 1
