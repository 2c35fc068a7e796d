"""A dataclass field whose value is converted to a list when it is first read."""

from typing import Any


class LazyList:
    """Descriptor for a dataclass field, assigned as the field's default. The default value is then
    None. A value with a method ``to_list`` is replaced by its list when it is first read."""

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
