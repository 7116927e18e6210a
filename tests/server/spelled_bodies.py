"""Bodies of every code that names topics or groups in one, with every spelling of a name that fastjson takes."""

import json
from collections.abc import Iterator
from typing import Any

from rocketmq_tiered.server.security.permissions import BODIES

SECRET, VICTIM = "12345678-secret", "victim"
ACL_1 = {
    "accounts": [
        {
            "accessKey": "reader1",
            "secretKey": SECRET,
            "defaultTopicPerm": "DENY",
            "defaultGroupPerm": "DENY",
            "topicPerms": ["own=PUB|SUB"],
            "groupPerms": ["own=SUB"],
        }
    ]
}
ACL_5 = {
    "users": [{"username": "reader1", "password": SECRET}],
    "acls": [
        {
            "subject": "User:reader1",
            "policies": [
                {
                    "entries": [
                        {"resource": f"{kind}:own", "actions": ["All"], "decision": "Allow"}
                        for kind in ("Topic", "Group")
                    ]
                }
            ],
        }
    ],
}
OWN_FIELDS = dict.fromkeys(
    ("topic", "b", "consumerGroup", "group", "groupName", "originTopic", "producerGroup"), "own"
)


def own(shape: Any) -> Any:
    """A body of ``shape`` about the account's own topic and group."""
    if isinstance(shape, dict):
        return {name: own(one) for name, one in shape.items()}
    return [own(shape[0])] if isinstance(shape, list) else "own" if shape == "text" else 0


def spellings(name: str) -> Iterator[str]:
    """Those that fastjson 1 or 2 take for ``name``, and some that none takes."""
    words = "".join(f"_{char.lower()}" if char.isupper() else char for char in name)
    capital = name[0].upper() + name[1:]
    for form in {
        name,
        words,
        words.replace("_", "-"),
        words.replace("_", ""),
        capital,
        name.upper(),
        words.upper(),
    }:
        yield from (
            form,
            f"_{form}",
            f"-{form}",
            f"{form}_",
            f"is{form}",
            f"is_{form}",
            f"{form} ",
            f"${form}",
        )


def places(document: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Every object in ``document`` with each of its names."""
    for child in (
        document.values() if isinstance(document, dict) else document if isinstance(document, list) else ()
    ):
        yield from places(child)
    if isinstance(document, dict):
        yield from ((document, name) for name in list(document))


def respelled(code: int) -> Iterator[bytes]:
    """Bodies of ``code`` with the victim under another spelling of one name, beside the name or in its place."""
    for at in range(len(list(places(own(BODIES[code]))))):
        for is_added in (True, False):
            for spelling in spellings(list(places(own(BODIES[code])))[at][1]):
                document = own(BODIES[code])
                place, name = list(places(document))[at]
                if spelling == name:
                    continue
                value = place[name] if is_added else place.pop(name)
                place[spelling] = json.loads(
                    json.dumps(value).replace("own", VICTIM).replace("0", f'"{VICTIM}"')
                )
                yield json.dumps(document).encode()
