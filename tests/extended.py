"""Which integration tests `.ci/run` excludes, because a slow machine has no time for them: other versions, stores and
servers than those that it runs, and scenes that take minutes. `make integration` runs all.

Owns the list.
"""

import re

ALL = ""
EXTENDED = {
    "archive/test_verify_memory.py": ALL,
    "benchmarks/test_aging.py": ALL,
    "benchmarks/test_offload.py": ALL,
    "benchmarks/test_one_shot.py": ALL,
    "broker_store/test_real_stores.py": ALL,
    "end_to_end/test_ground_truth.py": r".*\[[ADG]",
    "end_to_end/test_read_truth.py": r".*\[[ABDGH]",
    "faults/test_kill_nine.py": r".*\[(commit sent|data put|index build|reply lost|scan)",
    "faults/test_non_stop_write.py": ALL,
    "fetcher/queries/test_ground_truth.py": r".*\[A",
    "fetcher/test_read_router.py": r".*\[[ADGH]",
    "fetcher/test_sql92_java.py": r".*\[5\.5",
    "integration/test_access.py": r".*\[(4|archive 1)",
    "integration/test_admin_page.py": ALL,
    "integration/test_broker_copies.py": r".*\[5\.5",
    "integration/test_archived_tables.py": ALL,
    "integration/test_bucket_policies.py": r"test_(an_action_taken_away|no_role|plain_http)",
    "integration/test_compaction.py": r"test_rows_of_real_stores.*\[[ACDE]",
    "integration/test_compaction_live.py": ALL,
    "integration/test_compaction_topics.py": r".*\[H2",
    "integration/test_compose_accounts.py": ALL,
    "integration/test_consumequeue_brokers.py": r".*\[(4|5\.5|5\.3\.3-[AG])",
    "integration/test_dashboard.py": ALL,
    "integration/test_detach.py": r".*\[(4|5\.5|5\.3\.3-3)",
    "integration/test_doctor.py": r"test_a_missing_permission|test_emulators|test_a_broker_its",
    "integration/test_field_faults.py": r".*\[(4|5\.5)|test_(an_emptied|an_older|a_second|a_sidecar|a_slave)",
    "integration/test_gc_buckets.py": r"test_one_key_of_thousands",
    "integration/test_ground_truth_servers.py": r".*(localstack\[[A-EGH]|minio\[[ACDEGH])",
    "integration/test_hostile.py": ALL,
    "integration/test_install_and_run_pages.py": ALL,
    "integration/test_key_compaction_live.py": ALL,
    "integration/test_live_broker.py": r".*\[(4|5\.5)|test_(restarts|lmqs_are|the_archive_shows)",
    "integration/test_mount.py": r"test_a_(drill|restored|broker_whose)",
    "integration/test_proxy_clients.py": r".*\[(4|5\.5)|test_mqadmin",
    "integration/test_proxy_timers.py": r".*\[(4|5\.5)|test_(a_grpc|the_producers)",
    "integration/test_proxy_wire.py": r".*\[4",
    "integration/test_recreated_topic.py": ALL,
    "integration/test_reserve_time.py": ALL,
    "integration/test_restore.py": r".*\[(B|D|K|A-none|G-rocksdb|A-rocksdb|C-file|[DG]-both)|test_queues",
    "integration/test_restore_drill.py": r".*\[5\.5",
    "integration/test_scrub_live.py": ALL,
    "integration/test_serving.py": r"test_a_consumer_of_each_kind.*\[(4|5\.5)"
    r"|test_(mqadmin|the_server_ends|a_group_continues|a_grpc_client_gets_the_tag|a_remoting|a_go_consumer.*\[t_order)",
    "integration/test_serving_security.py": r".*\[(4|5\.5)",
    "integration/test_slave.py": r"test_(it_is_listed|name_server|an_acl_enabled)",
    "integration/test_republish.py": r".*\[5",
    "integration/test_timers.py": r".*\[(4|5\.5)|test_(timers_wait|pending)",
    "kernels/test_compiled_ahead.py": r"test_no_process",
    "kernels/test_jit.py": r"test_(a_change|a_process|kernels_run)",
    "kernels/test_scan.py": r".*\[(A|C|G|H2)",
    "spark/jobs/test_compact.py": r"test_a_(repeated|job)",
    "spark/jobs/test_compact_keys.py": r"test_the_same",
    "spark/jobs/test_notebook.py": ALL,
    "spark/jobs/test_over_s3.py": ALL,
    "spark/jobs/test_reading_jobs.py": r"test_(verbs|a_message_with_other|dropped_by)",
    "spark/test_cluster.py": ALL,
    "spark/test_guide.py": r"test_the_commands",
    "spark/test_views.py": ALL,
    "spark/test_ground_truth.py": r"test_every_field.*\[[ACDEFGH]|test_the_dataframe.*\[spark",
    "spark/test_planning.py": r"test_(spark_does|a_plan)",
    "spark/test_stream.py": r"test_a_replaced_log.*\[steps[02]",
    "server/proxy/test_pull_real_stores.py": r".*\[D",
    "sql/test_ten_questions.py": r"test_spark|.*\[(A|C|E)",
    "process/test_s3_commands.py": r"test_a_whole_cycle_on_(localstack|moto)",
}
"""File below tests/ to a regular expression of its tests."""


def is_extended(node_id: str) -> bool:
    """Whether `.ci/run` excludes this integration test."""
    file, _, test = node_id.removeprefix("tests/").partition("::")
    return file in EXTENDED and re.match(EXTENDED[file], test) is not None
