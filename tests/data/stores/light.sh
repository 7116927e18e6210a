#!/usr/bin/env bash
# How the stores L, M, N and O here were made, by brokers' own message stores (tests/servers/java/LightStore.java), with
# what those said of their queues. args: where the jars of the versions are (a directory each), an empty directory, the
# stores to make (all).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
jars=$1 out=$2 wanted=${3:-LMNO}
opens="--add-opens=java.base/java.nio=ALL-UNNAMED --add-opens=java.base/sun.nio.ch=ALL-UNNAMED
 --add-opens=java.base/jdk.internal.ref=ALL-UNNAMED --add-exports=java.base/jdk.internal.ref=ALL-UNNAMED
 --add-exports=java.base/sun.nio.ch=ALL-UNNAMED --add-opens=java.base/java.lang=ALL-UNNAMED"

# run NAME VERSION "SETTINGS" RECORDS... : in a new process, which ends in order
run() {
    local name=$1 version=$2 settings=$3
    shift 3
    [[ $wanted == *${name%%-*}* ]] || return 0
    mkdir -p "$out/classes-$version" "$out/$name/truth" "$out/home"
    [ -e "$out/classes-$version/LightStore.class" ] || javac -nowarn -cp "$jars/$version/*" -d "$out/classes-$version" "$here/../../servers/java/LightStore.java"
    tr ' ' '\n' <<<"$settings" >"$out/$name/broker.conf"
    # shellcheck disable=SC2086
    java $opens -Duser.home="$out/home" -cp "$out/classes-$version:$jars/$version/*" LightStore "$out/$name/store" $settings -- "$@" \
        | grep '^\[' >"$out/$name/truth/units.jsonl" || true
}

pack() {
    [[ $wanted == *${1%%-*}* ]] || return 0
    rm -f "$out/$1/store/lock" "$out/$1/store/abort"
    tar -C "$out" --sort=name --owner=root:0 --group=root:0 --mtime=2026-11-22 -cf - "$1" | zstd -19 -q -o "$here/$1.tar.zst" -f
}

both="enableLmq=true enableMultiDispatch=true"
lists="%LMQ%a,audit"

# 4.9: records of every topic are dispatched, and plain names too, to the record's own queue id
run L-497-light 4.9.7 "$both" "orders/0/0/$lists" "orders/1/0/$lists" "%RETRY%g/0/0/$lists" "audit/0/0" \
    "orders/0/3/$lists" "rmq_sys_x/0/0/$lists" "orders/0/0/%LMQ%a,%LMQ%a" "orders/0/0/%LMQ%b|c,%LMQ%a" "audit/1/0/%LMQ%late"
run L-497-light 4.9.7 "$both" "%RETRY%g/0/0/$lists" "orders/0/0/$lists" "%RETRY%g/1/0/%LMQ%only" \
    "?orders/0" "?orders/1" "?%RETRY%g/0" "?%RETRY%g/1" "?audit/0" "?audit/1" "?audit/2" "?SCHEDULE_TOPIC_XXXX/2" "?rmq_sys_x/0" \
    "?%LMQ%a/0" "?%LMQ%late/0" "?%LMQ%only/0"
pack L-497-light

# 5.3.3, files: a name twice makes offsets jump, until a restart; %RETRY%, rmq_sys_ and scheduled ones are not dispatched
twice="%LMQ%a,%LMQ%a"
run M-533-light 5.3.3 "$both" "orders/0/0/$twice" "orders/0/0/$twice" "orders/0/0/%LMQ%a,%LMQ%b" "%RETRY%g/0/0/%LMQ%a,%LMQ%b/4,0" \
    "SCHEDULE_TOPIC_XXXX/2/0/%LMQ%b/0" "rmq_sys_x/0/0/%LMQ%b/0" "orders/0/0/$twice" "orders/0/0/%LMQ%b|c,%LMQ%a"
run M-533-light 5.3.3 "$both" "orders/0/0/%LMQ%a" "orders/0/0/$twice" "orders/0/0/%LMQ%a,%LMQ%b" \
    "?orders/0" "?%RETRY%g/0" "?SCHEDULE_TOPIC_XXXX/2" "?rmq_sys_x/0" "?%LMQ%a/0" "?%LMQ%b/0"
pack M-533-light

# 5.5.0, RocksDB: offsets stay as they are given, names hold what they like
rocksdb="$both storeType=defaultRocksDB"
run N-550-light 5.5.0 "$rocksdb" "orders/0/0/$twice" "orders/0/0/%LMQ%b|c,%LMQ%a" "%RETRY%g/0/0/%LMQ%a,%LMQ%b|c/2,0" "orders/0/0/$twice"
run N-550-light 5.5.0 "$rocksdb" "orders/0/0/%LMQ%a,%LMQ%b|c" "orders/0/0/%LMQ%a" \
    "?orders/0" "?%RETRY%g/0" "?%LMQ%a/0" "?%LMQ%b|c/0"
pack N-550-light

# 5.3.3 as it comes, without light queues: what a client copied from elsewhere names them all the same
run O-533-light 5.3.3 "enableLmq=false enableMultiDispatch=false" "orders/0/0/%LMQ%a,%LMQ%b/3,0" "orders/0/0/%LMQ%a/4" \
    "?orders/0" "?%LMQ%a/0" "?%LMQ%b/0"
pack O-533-light
