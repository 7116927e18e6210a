"""Questions to a SQL92 filter, and the broker's own answers to them (its filter module, run by Java).

`python -m tests.fetcher.sql92_questions` asks RocketMQ 5.5.0 and writes sql92_vectors.jsonl.
"""

import base64
import json
import random
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.servers.rocketmq import java_classes, rocketmq_jars

VERSION = "5.5.0"
VECTORS = Path(__file__).parent / "sql92_vectors.jsonl"
Question = tuple[str, Mapping[str, str]]

HELLO = {"a": "x", "n": "5", "t": "true", "e": "abc", "d": "3.14", "quoted": "''tag''"}
ORDINARY = """
a=3 and b<>4 And c>5 AND d<=4|a=3  and    b<>4 And c>5 AND d<=4|a=3 or b<>4 Or c>5 OR d<=4|a in ('3', '4', '5')
a not in ('3', '4', '5')|(a not in ('6', '4', '5')) or (b in ('3', '4', '5'))|a between 2 and 10|a not between 2 and 10
(a between 2 and 10) AND (b not between 6 and 9)|a is null|a is not null|a is not null and a='hello'|a=TRUE OR b=FALSE
a is null OR a='hello'|a <= now|a and between 2 and 10|a between 10 and 0|a > b|a=b|a<>b|a between up and low
key is not null and key between 0 and 100|a > 100000000000000000000000|a > 3.14|a > 3.1E10
quoted is not null and quoted='''''tag'''''
""".strip()
"""As in the broker's own tests (ExpressionTest, ParserTest)."""
CORNERS = """
a = 'x' garbage|a = 'x' )|a CONTAINS 'x'|a contains ''|z contains 'x'|z not contains 'x'|a not contains ''
a startswith 'x'|a endswith 'x'|a endswith ''|z not startswith 'q'|a not endswith 'q'|(a='x') contains 't'
(a='x') not contains 't'|'xyz' contains 'y'|5 contains 'y'|(e > 3) contains ''|a = 'x' -- c|a = 'x' /* c */ and n=5
n=5L|n=0L|n = 05|n > 0.0|n > -0.1|n between 1 and 'x'|n between TRUE and 5|a|not a|t|-n = 5|-a|TRUE|FALSE|NULL|NOT NULL
TRUE = 5|5 = TRUE|'x' <> z|z <> 'x'|z = q|z <> q|n = 5 = TRUE|n > 4 > 3|a in ('x',)|a in ()|a in (5)|(a) in ('x')
'b' in ('b')|a is null is null|n NOT BETWEEN 9 AND 1|n = 2147483648|n = 2147483647|n=9223372036854775807
n=9223372036854775808|n=+5|n=-+-5|n = --5|a = 'x' and|a == 'x'|a != 'x'|a = "x"|a='it''s'|a = 'x|$a_1 is null
a='x' AND (n=5|not not a='x'|not (a='x')|n=5 or e>3|e>3 or n=5|not (e>3)|n > 5.|n>.5|n=5e0|n=5e|n=1e400|n=1e-400
n=5.5.5|n = 5;|n = 5 not x|n = 5 is x|TRUE AND n=5|n = 5 and NULL|NULL or n=5|TRUE = TRUE|TRUE='x'|t=TRUE|TRUE=t|t=true
n between (4) and +6
n between -6 and 6|n<TRUE|n < (n=5)|(n=5) = (a='x')|(n=5)=t|n = NULL|NULL = NULL|d > 3|d > 3.0|d = 3.14|n > 4.5|3 < n
'5' = 5|5 = '5'|5 = n|5.0 = n|d <> 3|a LIKE 'x%'|now is null|n IN ('5','6')|n NOT IN ('5')|z NOT IN ('5')|(z) IS NULL
""".strip()

_VALUES = [
    "x",
    "5",
    "5.0",
    "-5",
    "+5",
    " 5 ",
    "true",
    "TRUE",
    "abc",
    "3000000000",
    "1e3",
    "0x1p3",
    "NaN",
    "Infinity",
    "-0.0",
    "0.0",
    "0",
    "1d",
    "2f",
    "it's",
    "9223372036854775808",
    "٥",
    "é",
    "xyz",
    "1e",
    "false",
    "-0",
    "1e400",
    "-Infinity",
    "0x1p99999",
    "-0x.8p1",
    "1_000",
    "\t7\n",
    "５",
    "𝟓",
    "1.e1",
    ".",
    "",
    "++1",
    "tRuE",
]
_NAMES = ["a", "b", "c", "$x_1", "TAGS"]


def fixed_questions() -> list[Question]:
    """Every ordinary and odd case, with several messages each."""
    texts = [text for block in (ORDINARY, CORNERS) for line in block.split("\n") for text in line.split("|")]
    messages = [
        {},
        HELLO,
        {"a": "3", "b": "5", "c": "6", "d": "1"},
        {"a": "4", "b": "4", "c": "3", "d": "10"},
        {"a": "10", "b": "20", "up": "up", "low": "low", "key": "con"},
        {"a": "hello", "n": "-5", "t": "FALSE"},
        {"a": "true", "b": "false", "n": "5.0", "z": "x"},
        {"a": "31415000000.0", "n": "abc", "key": "50"},
    ]
    return [(text, message) for text in texts for message in messages]


def random_questions(seed: int, count: int) -> list[Question]:
    """Filters of random shape, one in ten damaged, and random messages."""
    chance = random.Random(seed)
    return [(_damaged(chance, _disjunction(chance, 2)), _message(chance)) for _ in range(count)]


def ask_broker(questions: Iterable[Question], version: str = VERSION) -> list[str]:
    """invalid, true, false, null or error for each. Raises NotInstallableError without Java or jars."""
    lines = [
        " ".join([_encoded(text), *(_encoded(part) for pair in message.items() for part in pair)])
        for text, message in questions
    ]
    command = ["java", "-cp", f"{java_classes(version)}:{rocketmq_jars(version)}/*", "Selector"]
    done = subprocess.run(command, input="\n".join([*lines, ""]), capture_output=True, text=True, check=True)
    answers = done.stdout.split()
    assert len(answers) == len(lines), done.stderr[-2000:]
    return answers


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode("utf-8")).decode("ascii")


def _message(chance: random.Random) -> dict[str, str]:
    values = [value for value in _VALUES if value]
    return {name: chance.choice(values) for name in _NAMES if chance.random() < 0.7}


def _text(chance: random.Random) -> str:
    return "'" + chance.choice(_VALUES).replace("'", "''") + "'"


def _unary(chance: random.Random, depth: int) -> str:
    kind = chance.randrange(14)
    if kind < 3:
        return ("-", "+", "NOT ")[kind] + _unary(chance, depth)
    if kind < 5 and depth > 0:
        return f"({_disjunction(chance, depth - 1)})"
    if kind < 8:
        return chance.choice(_NAMES)
    if kind < 10:
        return _text(chance)
    numbers = [
        "5",
        "0",
        "2147483647",
        "2147483648",
        "9223372036854775807",
        "9223372036854775808",
        "5L",
        "07",
        "10",
    ]
    doubles = ["5.", "5.0", ".5", "1e3", "1e400", "0.0", "5e", "3.14", "1E-3"]
    return chance.choice((numbers, doubles, numbers, ["TRUE", "FALSE", "NULL", "true"])[kind - 10])


def _condition(chance: random.Random, depth: int) -> str:
    kind, negation = chance.randrange(14), chance.choice(["", "", "NOT "])
    left = chance.choice([_unary(chance, depth), chance.choice(_NAMES)])
    if kind < 3:
        return left + chance.choice([" = ", " <> ", "="]) + _unary(chance, depth)
    if kind < 6:
        return left + chance.choice([" > ", " >= ", " < ", "<="]) + _unary(chance, depth)
    if kind < 8:
        return f"{left} {negation}BETWEEN {_unary(chance, depth)} AND {_unary(chance, depth)}"
    if kind < 9:
        return f"{left} {negation}IN ({', '.join(_text(chance) for _ in range(chance.randint(1, 6)))})"
    if kind < 11:
        operator = chance.choice(["CONTAINS", "startswith", "ENDSWITH"])
        sought = chance.choice(["'x'", "''", "'5'", "'y'"])
        return f"{left} {negation}{operator} {sought}"
    return f"{left} IS {negation}NULL" if kind < 13 else left


def _disjunction(chance: random.Random, depth: int) -> str:
    terms = [_condition(chance, depth) for _ in range(chance.choice([1, 1, 1, 2, 2, 3]))]
    joined = terms[0]
    for term in terms[1:]:
        joined += chance.choice([" AND ", " OR ", " and ", " or "]) + term
    return joined


def _damaged(chance: random.Random, text: str) -> str:
    if chance.random() < 0.9:
        return text
    at = chance.randrange(len(text) + 1)
    bits = [
        "",
        ";",
        " x ",
        " NOT ",
        " IS ",
        "(",
        ")",
        "'",
        "--",
        "--\n",
        "/* */",
        "/*",
        "=",
        "!",
        "\x0b",
        "é",
    ]
    return text[:at] + chance.choice(bits) + text[at + chance.randrange(2) :]


def write_vectors() -> None:
    """Fixed questions, and of the random ones those that are valid."""
    fixed, others = fixed_questions(), random_questions(7, 6000)
    lines, invalid = [], set()
    for question, answer in zip(fixed, ask_broker(fixed), strict=True):
        if answer != "invalid" or question[0] not in invalid:
            lines.append((question, answer))
        if answer == "invalid":
            invalid.add(question[0])
    lines += [line for line in zip(others, ask_broker(others), strict=True) if line[1] != "invalid"][:700]
    with VECTORS.open("w", encoding="utf-8") as file:
        for (text, message), answer in lines:
            file.write(json.dumps([text, message, answer], ensure_ascii=False) + "\n")


if __name__ == "__main__":
    write_vectors()
