"""The dictionary of the catalog's containers: what is in nearly every commit, root and page.

Never changed: objects that were written with it need it.
"""

from __future__ import annotations

DICTIONARY = (
    b'[["since_ms","<i8"],["version","<i8"]][["queue","<u4"],["min_queue_offset","<i8"],["rows",'
    b'"<i8"]][["queue","<u4"],["reason","<u4"],["begin_queue_offset","<i8"],["end_queue_offset",'
    b'"<i8"]][["queue","<u4"],["rows","<u4"],["base_queue_offset","<i8"],["end_queue_offset","<i'
    b'8"],["version","<i8"],["removed_version","<i8"]][["topic","<u4"],["queue_id","<i4"],["gene'
    b'ration","<u4"],["flags","<u4"],["min_queue_offset","<i8"],["end_queue_offset","<i8"],["end'
    b'_byte","<i8"],["first_phys","<i8"],["end_phys","<i8"],["max_store_timestamp","<i8"],["row_'
    b'count","<i8"]]tombstones{"":["abandoned","compacted","diverged","expired","intent","replac'
    b'ed"],"reason":""}[["pages/runs-00000000000000000000-1-","catalog/99999999999999999999:40:"'
    b'],["%RETRY%","%LMQ%","%DLQ%","SCHEDULE_TOPIC_XXXX"]]{"advanced_ms":1700000000000,"broker":'
    b'"broker-a","check":[0,0,0],"cluster":"DefaultCluster","created_ms":1700000000000,"deletion'
    b'_lists":[],"doomed":{"pages/root-00000000000000000000-1-":[1700000000000,0,"replaced"]},"e'
    b'poch":1,"indexes":[["index/0000000000000-0000000000000-1_.idx",0,1]],"kept_roots":[["pages'
    b'/root-00000000000000000000-1-",0]],"line":1,"lines":[],"major_version":1,"object_keys":[],'
    b'"owner":["","run","host",1700000000000,false],"pages":[],"phys":0,"put_id":"","root":["pag'
    b'es/root-00000000000000000000-1-",0],"settings":{"index_left_out":{},"log_damaged":[],"log_'
    b'lost":[]},"started":true,"state_objects":{"consumer_offsets":"","subscription_groups":"","'
    b'topics":"state/topics-1-0-"},"topics":[],"version":0}{"actor":"run-","broker":"broker-a","'
    b'check":[0,0,0],"cluster":"DefaultCluster","common_version":0,"created_ms":1700000000000,"d'
    b'eletions":{"added":[],"removed":[],"spilled":[]},"doomed":[],"epoch":1,"from_phys":0,"hide'
    b'":[],"index":{"added":[],"removed":[]},"kept_root":["",0],"kind":"append","line":1,"object'
    b'_keys":["data/00/0/0/00000000000000000000-1-0.so","sets/00/00000000000000000000-1-0.sso"],'
    b'"owner":null,"pages":{"added":[],"removed":[],"resolved_version":0,"root":["",0],"spilled_'
    b'version":0},"predecessor_put_id":"","purged":[],"put_id":"","reason":"abandoned","root":["'
    b'pages/root-00000000000000000000-1-",0],"settings":{},"state_objects":{},"to_phys":0,"topic'
    b's":[],"undoomed":[],"unhide":[],"version":0}queues[["topic","<u4"],["queue_id","<i4"],["ge'
    b'neration","<u4"]]runs[["queue","<u4"],["object","<u4"],["ordinal","<u4"],["kind","<u4"],["'
    b'version","<i8"],["base_queue_offset","<i8"],["end_queue_offset","<i8"],["rows","<i8"],["ba'
    b'se_byte","<i8"],["byte_count","<i8"],["min_store_timestamp","<i8"],["max_store_timestamp",'
    b'"<i8"],["min_phys","<i8"],["end_phys","<i8"]]removed[["queue","<u4"],["rows","<u4"],["base'
    b'_queue_offset","<i8"],["end_queue_offset","<i8"],["version","<i8"],["removed_version","<i8'
    b'"]]objects[["key","<u4"],["rows","<u4"],["size_bytes","<i8"],["tail_bytes","<i8"],["tail_c'
    b'rc32c","<u4"],["epoch","<u4"],["min_phys","<i8"],["end_phys","<i8"],["raw_bytes","<i8"],["'
    b'ttl_class_days","<u4"]]gaps[["queue","<u4"],["reason","<u4"],["begin_queue_offset","<i8"],'
    b'["end_queue_offset","<i8"]]floors[["queue","<u4"],["min_queue_offset","<i8"],["rows","<i8"'
    b"]]"
)
