"""The helper for tests that go through a table."""

import pytest

from tests.tables import each


def test_every_entry_is_tried_and_those_that_fail_are_named(tmp_path):
    seen = []

    @each("number, text", [(1, "a"), (2, "b"), (3, "c"), (4, "d")])
    def check(folder, number, text):
        seen.append((folder, number, text))
        if number == 2:
            raise KeyError(text)
        if number == 4:
            with pytest.raises(ValueError):
                pass

    with pytest.raises(BaseExceptionGroup, match=r"2 of 4 entries fail: .*'b'.*'d'") as error:
        check(folder=tmp_path)
    assert seen == [(tmp_path, 1, "a"), (tmp_path, 2, "b"), (tmp_path, 3, "c"), (tmp_path, 4, "d")]
    assert isinstance(error.value.exceptions[0], KeyError)


def test_an_empty_table_is_no_test():
    with pytest.raises(AssertionError, match="empty"):
        each("value", [])(lambda value: None)()
