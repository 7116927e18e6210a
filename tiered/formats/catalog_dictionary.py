"""The dictionary of the catalog's containers: what is in nearly every commit, root and page.

Never changed: objects that were written with it need it.
"""

from __future__ import annotations

DICTIONARY = (
    b'[["since_ms","<i8"],["version","<i8"]][["queue","<u4"],["min_queue_offset","<i8"],["rows","<'
    b'i8"]][["queue","<u4"],["reason","<u4"],["begin_queue_offset","<i8"],["end_queue_offset","<i8'
    b'"]][["queue","<u4"],["rows","<u4"],["base_queue_offset","<i8"],["end_queue_offset","<i8"],["'
    b'version","<i8"],["removed_version","<i8"]][["topic","<u4"],["queue_id","<i4"],["generation",'
    b'"<u4"],["flags","<u4"],["min_queue_offset","<i8"],["end_queue_offset","<i8"],["end_byte","<i'
    b'8"],["first_phys","<i8"],["end_phys","<i8"],["max_store_timestamp","<i8"],["row_count","<i8"'
    b']]tombstones{"":["abandoned","compacted","diverged","expired","intent","replaced"],"reason":'
    b'""}[["pages/runs-00000000000000000000-1-"],["%RETRY%","%LMQ%","%DLQ%","SCHEDULE_TOPIC_XXXX"]'
    b']{"advanced_ms":1700000000000,"broker":"broker-a","check":[0,0,0],"cluster":"DefaultCluster"'
    b',"created_ms":1700000000000,"deletion_lists":[],"pending_deletions":{"pages/root-00000000000'
    b'000000000-1-":[1700000000000,0,"replaced"]},"epoch":1,"indexes":[["index/0000000000000-00000'
    b'00000000-1_.idx",0,1]],"kept_roots":[["pages/root-00000000000000000000-1-",0]],"log_historie'
    b's":[],"log_history":1,"object_keys":[],"owner":["","run","host",1700000000000,false],"pages"'
    b':[],"phys":0,"put_id":"","root":["pages/root-00000000000000000000-1-",0],"settings":{"uninde'
    b'xed":{},"log_damaged":[],"log_lost":[]},"started":true,"state_objects":{"consumer_offsets":"'
    b'","subscription_groups":"","topics":"state/topics-1-0-"},"topics":[],"version":0}{"actor":"r'
    b'un-","broker":"broker-a","check":[0,0,0],"cluster":"DefaultCluster","common_version":0,"crea'
    b'ted_ms":1700000000000,"deletions":{"added":[],"removed":[],"spilled":[]},"pending_deletions"'
    b':[],"epoch":1,"from_phys":0,"hide":[],"index":{"added":[],"removed":[]},"kept_root":["",0],"'
    b'kind":"append","log_history":1,"object_keys":["data/00/0/0/00000000000000000000-1-0.so","set'
    b's/00/00000000000000000000-1-0.sso"],"owner":null,"pages":{"added":[],"removed":[],"resolved_'
    b'version":0,"root":["",0],"spilled_version":0},"predecessor_put_id":"","purged":[],"put_id":"'
    b'","reason":"abandoned","root":["pages/root-00000000000000000000-1-",0],"settings":{},"state_'
    b'objects":{},"to_phys":0,"topics":[],"restored":[],"unhide":[],"version":0}queues[["topic","<'
    b'u4"],["queue_id","<i4"],["generation","<u4"]]runs[["queue","<u4"],["object","<u4"],["ordinal'
    b'","<u4"],["kind","<u4"],["version","<i8"],["base_queue_offset","<i8"],["end_queue_offset","<'
    b'i8"],["rows","<i8"],["base_byte","<i8"],["byte_count","<i8"],["min_store_timestamp","<i8"],['
    b'"max_store_timestamp","<i8"],["min_phys","<i8"],["end_phys","<i8"]]removed[["queue","<u4"],['
    b'"rows","<u4"],["base_queue_offset","<i8"],["end_queue_offset","<i8"],["version","<i8"],["rem'
    b'oved_version","<i8"]]objects[["key","<u4"],["rows","<u4"],["size_bytes","<i8"],["tail_bytes"'
    b',"<i8"],["tail_crc32c","<u4"],["epoch","<u4"],["min_phys","<i8"],["end_phys","<i8"],["raw_by'
    b'tes","<i8"],["ttl_class_days","<u4"]]gaps[["queue","<u4"],["reason","<u4"],["begin_queue_off'
    b'set","<i8"],["end_queue_offset","<i8"]]floors[["queue","<u4"],["min_queue_offset","<i8"],["r'
    b'ows","<i8"]]'
)
