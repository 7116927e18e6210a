"""Lets a broker store grow while it is read."""


def grows(name: str, topic: str) -> bool:
    """Topics that grew after the truth was read, or that the recorded broker did not serve."""
    return topic.startswith("rmq_sys_REVIVE_LOG") or (name == "D" and topic == "RMQ_SYS_TRANS_OP_HALF_TOPIC")
