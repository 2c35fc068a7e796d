"""A dataclass field whose value may become a list only when it is read."""

from typing import Any


class LazyList:
    """The default of a dataclass field whose default value is None. A value with a method
    ``to_list`` becomes that list when it is first read."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = f"_{name}"

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return None
        value = vars(instance)[self.name]
        if hasattr(value, "to_list"):
            value = vars(instance)[self.name] = value.to_list()
        return value

    def __set__(self, instance: Any, value: Any) -> None:
        vars(instance)[self.name] = None if value is self else value
