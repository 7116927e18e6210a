"""SQL92 filters beside the broker's own filter module, run by Java on random filters and messages."""

import pytest

from tests.fetcher.sql92_judgement import judged
from tests.fetcher.sql92_questions import ask_broker, fixed_questions, random_questions
from tests.servers.install import NotInstallableError

QUESTIONS = 20_000


@pytest.mark.integration
@pytest.mark.parametrize("version", ["5.3.3", "5.5.0"])
def test_random_filters_are_judged_as_by_the_broker(version: str) -> None:
    questions = [*fixed_questions(), *random_questions(len(version) + int(version[2]), QUESTIONS)]
    try:
        answers = ask_broker(questions, version)
    except NotInstallableError as error:
        pytest.skip(str(error))
    for (text, message), answer in zip(questions, answers, strict=True):
        assert judged(text, dict(message)) == answer, (text, message)
