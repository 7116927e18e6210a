"""A report of an instance to which nothing has happened, for tests of who shows it."""

from rocketmq_tiered.process.report import StatusReport

REPORT = StatusReport(
    source="instance",
    state="",
    archive_url="memory://a",
    cluster="C",
    broker="b",
    writer="w",
    epoch=3,
    committed_phys=10,
    bound_phys=20,
    bound_reason="the broker's confirm offset",
    lag_messages=1,
    lag_bytes=10,
    lag_seconds=0.5,
    retention_margin_seconds=None,
    gaps=0,
    errors=0,
    last_error="",
    budget_used_bytes=1,
    budget_limit_bytes=2,
    pins=0,
    pin_note="",
    messages=5,
    bytes=50,
    queues=(),
)
