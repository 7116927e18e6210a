"""Parser of the JSON dialect that fastjson writes: broker configuration files and remoting bodies.

Strict JSON is parsed by orjson. fastjson adds integer keys without quotes (``{0:17}``), objects as keys
(``{{"brokerName":"a"}:{…}}``), single quotes, bare identifiers as keys, stray commas, ``\\x41`` and ``\\v`` escapes.

Any client can send such text, so time and memory are proportional to its length. The dialect is parsed a hundred times
slower than strict JSON: callers limit its length. Sources: com.alibaba.fastjson 1.2.83 ``JSONLexerBase``,
``DefaultJSONParser``.
"""

import re
from typing import Any, Final

import orjson

from tiered.errors import CorruptionError
from tiered.formats.memory_bound import JSON_BYTE_COST_MAX, Allowance, MemoryBound

DEPTH_MAX: Final = 128
VALUES: Final = Allowance(256 << 20, 32)
"""Memory that a text's values may take."""

# A string without an end matches too, and no part backtracks: both keep the search linear.
_STRING_OR_INTEGER_KEY = re.compile(r'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|(?<=[{,\s])(-?\d++)(?=\s*+:)', re.DOTALL)
_SPACE_OR_COMMENT = re.compile(r"(?:[\s\ufeff\b]+|//[^\n]*|/\*.*?\*/)+", re.DOTALL)
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_NUMBER_SUFFIX = re.compile(r"[LSBFD]?(?![\w.$])")
_IDENTIFIER = re.compile(r"[A-Za-z_$][\w$.-]*")
_PLAIN = {'"': re.compile(r'[^"\\]*'), "'": re.compile(r"[^'\\]*")}
_HEX = re.compile(r"[0-9A-Fa-f]+")
_ESCAPES: Final = {
    '"': '"',
    "'": "'",
    "\\": "\\",
    "/": "/",
    "b": "\b",
    "f": "\f",
    "F": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "v": "\v",
    "0": "\0",
    "1": "\1",
    "2": "\2",
    "3": "\3",
    "4": "\4",
    "5": "\5",
    "6": "\6",
    "7": "\7",
}
_WORDS: Final = {"true": True, "false": False, "null": None, "undefined": None, "NaN": None}


class FastjsonError(CorruptionError):
    """The text is not JSON in any dialect fastjson writes. ``position``: the character at which parsing fails."""

    def __init__(self, what: str, position: int) -> None:
        super().__init__(f"invalid JSON at character {position}: {what}")
        self.position = position


def loads(text: str | bytes, *, dialect_max: int | None = None, values: Allowance = VALUES) -> Any:
    """The value of ``text``, which is strict JSON or in the dialect that fastjson, RocketMQ's JSON library, writes:
    with bare keys, or objects as keys, which become their JSON text.

    ``dialect_max``: how many characters (of ``bytes``: bytes) a text in the dialect may have, as it is slow to parse;
    ``values``: how much memory its values may take. Of two equal keys the last wins, as in a Java map. Raises
    FastjsonError.
    """
    if len(text) * JSON_BYTE_COST_MAX > values.free_bytes:
        _check_values(text, values)
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        pass  # parsed as the dialect
    if dialect_max is not None and len(text) > dialect_max:
        raise FastjsonError(
            f"the text is not standard JSON, and fastjson's extensions are read in texts of up to {dialect_max} "
            f"characters, not of {len(text)}",
            0,
        )
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise FastjsonError("not UTF-8", error.start) from error
    try:
        return orjson.loads(_STRING_OR_INTEGER_KEY.sub(_quote_key, text))
    except orjson.JSONDecodeError:
        return _Parser(text).document()


def _check_values(text: str | bytes, values: Allowance) -> None:
    """Raise FastjsonError if the values of ``text`` would take more memory than ``values`` allows."""
    encoded = text.encode("utf-8", "replace") if isinstance(text, str) else text
    try:
        MemoryBound(len(encoded), values).charge_json(encoded, "values")
    except ValueError as error:
        raise FastjsonError(str(error), 0) from error


def _quote_key(match: re.Match[str]) -> str:
    return match[0] if match[1] is None else f'"{match[1]}"'


class _Parser:
    """Recursive descent over one text, slow and complete."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0
        self._is_in_key = False

    def document(self) -> Any:
        value = self._value(0)
        if self._peek():
            raise self._error("there is text after the end of the value")
        return value

    def _error(self, what: str) -> FastjsonError:
        return FastjsonError(what, self._position)

    def _peek(self) -> str:
        space = _SPACE_OR_COMMENT.match(self._text, self._position)
        if space:
            self._position = space.end()
        return self._text[self._position : self._position + 1]

    def _value(self, depth: int) -> Any:
        """Parse the value at the parser's position: an object, array, string, number, or a word such as ``null``.
        Raises FastjsonError for anything else, and for values that are nested more than DEPTH_MAX times; ``depth``: how
        often this one is."""
        if depth > DEPTH_MAX:
            raise self._error("nested too deeply")
        first = self._peek()
        if first == "{":
            return self._object(depth)
        if first == "[":
            return self._array(depth)
        if first in ('"', "'"):
            return self._string(first)
        number = _NUMBER.match(self._text, self._position)
        if number:
            return self._number(number)
        word = _IDENTIFIER.match(self._text, self._position)
        if word and word[0] in _WORDS:
            self._position = word.end()
            return _WORDS[word[0]]
        raise self._error("a value is missing" if first else "the text ends too early")

    def _number(self, number: re.Match[str]) -> int | float:
        """The value of a number that was matched at the parser's position: an int if it has no fraction or exponent. A
        suffix of Java literals behind it, such as ``L``, is skipped."""
        suffix = _NUMBER_SUFFIX.match(self._text, number.end())
        if suffix is None:
            raise self._error("not a number")
        self._position = suffix.end()
        try:
            return int(number[0])
        except ValueError:
            return float(number[0])

    def _object(self, depth: int) -> dict[str, Any]:
        """Parse an object, whose opening brace is at the parser's position; ``depth``: how deeply it is nested. Extra
        commas are skipped; of equal keys the last one counts."""
        self._position += 1
        members: dict[str, Any] = {}
        while True:
            first = self._peek()
            if first == ",":
                self._position += 1
            elif first == "}":
                self._position += 1
                return members
            else:
                key = self._key(first, depth)
                if self._peek() != ":":
                    raise self._error("':' is missing")
                self._position += 1
                members[key] = self._value(depth + 1)
                if self._peek() not in (",", "}"):
                    raise self._error("',' or '}' is missing")

    def _key(self, first: str, depth: int) -> str:
        """Parse a key of an object, which begins with the character ``first``: in quotes, a bare word, a number, or an
        object or array, which becomes its JSON text."""
        if first in ("{", "["):
            return self._document_key(depth)
        if first in ('"', "'"):
            return self._string(first)
        bare = _IDENTIFIER.match(self._text, self._position) or _NUMBER.match(self._text, self._position)
        if bare is None:
            raise self._error("a key is missing" if first else "the text ends too early")
        self._position = bare.end()
        return bare[0]

    def _document_key(self, depth: int) -> str:
        """Parse a key that is itself an object or array, and return its JSON text. Raises FastjsonError if it contains
        another such key: each level would double the length of the quotes inside."""
        if self._is_in_key:
            raise self._error("an object is a key inside of another key")
        self._is_in_key = True
        try:
            return orjson.dumps(self._value(depth + 1)).decode("utf-8")
        except orjson.JSONEncodeError as error:
            raise self._error("an unusable key") from error
        finally:
            self._is_in_key = False

    def _array(self, depth: int) -> list[Any]:
        """Parse an array, whose opening bracket is at the parser's position; ``depth``: how deeply it is nested. Extra
        commas are skipped."""
        self._position += 1
        items: list[Any] = []
        while True:
            first = self._peek()
            if first == ",":
                self._position += 1
            elif first == "]":
                self._position += 1
                return items
            else:
                items.append(self._value(depth + 1))
                if self._peek() not in (",", "]"):
                    raise self._error("',' or ']' is missing")

    def _string(self, quote: str) -> str:
        """Parse a string, whose opening ``quote`` is at the parser's position. Two escapes that are a surrogate pair
        become one character."""
        self._position += 1
        parts: list[str] = []
        while True:
            plain = _PLAIN[quote].match(self._text, self._position)
            assert plain is not None  # the pattern matches the empty string
            parts.append(plain[0])
            self._position = plain.end()
            stop = self._text[self._position : self._position + 1]
            if not stop:
                raise self._error("a string does not end")
            self._position += 1
            if stop == quote:
                # Surrogate pairs arrive as two escapes; Java joins them by writing UTF-16.
                return "".join(parts).encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
            parts.append(self._escape())

    def _escape(self) -> str:
        """Parse what follows a backslash in a string, and return the character: ``u`` with four hexadecimal digits,
        ``x`` with two, or a letter such as ``n``."""
        letter = self._text[self._position : self._position + 1]
        self._position += 1
        if letter in ("u", "x"):
            digits = self._text[self._position : self._position + (4 if letter == "u" else 2)]
            if len(digits) != (4 if letter == "u" else 2) or not _HEX.fullmatch(digits):
                raise self._error("an escape has too few hexadecimal digits")
            self._position += len(digits)
            return chr(int(digits, 16))
        if letter not in _ESCAPES:
            raise self._error("a backslash is before a character that is no escape")
        return _ESCAPES[letter]
