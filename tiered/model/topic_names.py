"""Which names brokers take for a topic, and to which topics no timer is sent. Pure."""

import re

from tiered.model.queue import LMQ_PREFIX, SYSTEM_PREFIX, SYSTEM_TOPICS

NAME_CHARS_MAX = 127
_NAME = re.compile(r"[%|a-zA-Z0-9_-]+\Z")
_RESERVED = {
    "%RETRY%": "a retry topic",
    "%DLQ%": "a dead letter topic",
    LMQ_PREFIX: "an LMQ",
    SYSTEM_PREFIX: "a system topic",
}


def invalid_name(name: str) -> str | None:
    """Why a broker refuses ``name`` for a topic or group (TopicValidator.validateTopic); None: it takes it."""
    if len(name) > NAME_CHARS_MAX:
        return f"{shortened(name)} has {len(name):,} characters, more than the {NAME_CHARS_MAX} of a name"
    if not _NAME.match(name):
        return f"{shortened(name)!r} has characters other than letters, digits, %, |, - and _"
    return None


def refused_target(topic: str, gateway_topic: str = "") -> str | None:
    """Why a message with a delivery time (a timer) may not be sent to ``topic``, as a clause; None: it may.
    ``gateway_topic``: the topic that takes timers, to which none is delivered."""
    if (why := invalid_name(topic)) is not None:
        return why
    if topic in SYSTEM_TOPICS or topic.endswith("_REPLY_TOPIC"):
        return f"{topic} is a system topic"
    if topic == gateway_topic:
        return f"{topic} is the gateway topic of timers"
    for prefix, what in _RESERVED.items():
        if topic.lower().startswith(prefix.lower()):
            return f"{topic} is {what}"
    return None


def shortened(text: str, chars: int = 40) -> str:
    """``text`` that a client chose, for messages and logs."""
    return text if len(text) <= chars else f"{text[:chars]}…"
