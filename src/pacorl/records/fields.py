"""Fields that records in files share, and the validation of one record: pydantic names a faulty field."""

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

from pacorl.core.questions import text_fault
from pacorl.io.documents import typed
from pacorl.io.terminal import did_you_mean

Fields = TypeVar("Fields", bound=BaseModel)
Item = TypeVar("Item")
Key = TypeVar("Key")


def validated(record: Mapping[str, Any], kind: type[Fields]) -> Fields:
    """Validate a record; unknown keys are ignored unless they look misspelt. Raises ValueError naming the field."""
    names = kind.model_fields.keys()
    for key in record.keys() - names:
        guess = did_you_mean(key, names - record.keys(), cutoff=0.85)
        if guess:
            raise ValueError(f"unknown name {key!r}; {guess}")
    return typed(dict(record), kind)


def by_key(items: Iterable[Item], key: Callable[[Item], Key], *, source: object) -> dict[Key, Item]:
    """Map the key of each item to it. Raises ValueError for two of one key; it names the source."""
    item_of: dict[Key, Item] = {}
    for item in items:
        if item_of.setdefault(key(item), item) is not item:
            raise ValueError(f"{source}: two records have the key {key(item)!r}; take one out")
    return item_of


def _with_text(criteria: Any) -> Any:
    """Drop null entries: published files have names without a text, and dimensions without names."""
    if not isinstance(criteria, dict):
        return criteria or {}
    filled = {}
    for dimension, texts in criteria.items():
        written = {name: text for name, text in texts.items() if text} if isinstance(texts, dict) else texts
        if written:
            filled[dimension] = written
    return filled


def _spoken(text: str) -> str:
    fault = text_fault(text)
    if fault:
        raise ValueError(fault)
    return text


Name = Annotated[str, Field(min_length=1)]
NonBlank = Annotated[str, Field(pattern=r"\S")]
Word = Annotated[Name, BeforeValidator(lambda name: str(name) if type(name) is int else name)]
"""A name, or an integer used as one."""
Text = Annotated[str, BeforeValidator(lambda text: "" if text is None else text)]
"""A text; null is empty."""
Listed = Annotated[list[Name], BeforeValidator(lambda names: [names] if isinstance(names, str) else names or [])]
"""A list of names, or one of them."""
Spoken = Annotated[Text, AfterValidator(_spoken)]
"""A text of a conversation with a judge, without the tokens that would end it."""
Criteria = Annotated[Mapping[str, Mapping[str, Name]], BeforeValidator(_with_text)]
"""dimension → name → text."""
