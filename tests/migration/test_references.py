"""What objects refer to is found without a call of what is looked at."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest

from dynpipe_ds.migration.references import child, children


class LazyTable(OrderedDict[str, Any]):
    """Fills itself when it is first read, as a registry of models does, and can't where a package is missing."""

    def _fail(self, *_: Any) -> Any:
        raise ImportError("the table can't be filled here")

    items = keys = values = __iter__ = __getitem__ = __contains__ = __len__ = _fail


class LazyList(list[Any]):
    def _fail(self, *_: Any) -> Any:
        raise ImportError("the list can't be filled here")

    __iter__ = __getitem__ = __len__ = _fail


def lazy_table() -> LazyTable:
    table = LazyTable()
    dict.__setitem__(table, "a", "first")
    return table


@pytest.mark.parametrize("container, step", [(lazy_table(), "a"), (LazyList(["first"]), 0)], ids=["dict", "list"])
def test_containers_that_fill_themselves_are_only_looked_at(container: Any, step: Any) -> None:
    assert list(children(container)) == [(("item", step), "first")]
    assert child(container, ("item", step)) == "first"
