visible=$(echo "${CUDA_VISIBLE_DEVICES:-@ALL@}" | tr , ' ')
order=
for device in $devices; do
    name=$(nth $((device + 1)) $visible) || { echo "rank.sh: no device $device in $visible" >&2; exit 2; }
    order=$order,$name
done
export CUDA_VISIBLE_DEVICES=${order#,}
