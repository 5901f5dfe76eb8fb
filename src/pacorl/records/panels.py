"""The panel writer: one sentence that asks for several images → the texts of a set's panels.

    draft = write_panels("Generate four images of the same dentist: reading an X-ray, cleaning teeth, …")
    draft.theme, draft.panels, draft.note

It reads counts, lists and quotations from the sentence. `generate.language_writers` asks a language model instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pacorl.core.grid import QUOTED, panel_texts

DEFAULT_COUNT = 4
"""Panels of a request without a number, such as "several images"."""
MAX_COUNT = 16
NUMBERS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
)
AMOUNTS = {"pair": 2, "couple": 2, "trio": 3, "quartet": 4, "dozen": 12}
"""Nouns of a number."""


@dataclass(frozen=True, slots=True)
class SetRequest:
    """Request for several images, in one sentence."""

    text: str
    """The whole sentence."""
    count: int | None
    """Number of panels; None if the sentence names none."""
    unit: str = "image"
    """Singular noun of the counted things, such as "stage"."""
    content: str = ""
    """The sentence behind its count: the subject, and a list if there is one."""


@dataclass(frozen=True, slots=True)
class PanelDraft:
    """The texts of one set, to be shown to a person before anything is generated."""

    theme: str
    """Common theme of the panels."""
    panels: tuple[str, ...]
    """One text per panel, row-major."""
    criteria: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """dimension → name → criterion for all panels."""
    note: str = ""
    """Missing information in the sentence, and the remedy; empty if complete."""


PanelWriter = Callable[[SetRequest, int], PanelDraft]
"""(request, number of panels) → the draft."""


def write_panels(text: str, *, count: int | None = None, writer: PanelWriter | None = None) -> PanelDraft:
    """Write the panels of a request.

    Args:
        text: the sentence.
        count: number of panels; the sentence's own, else `DEFAULT_COUNT`.
        writer: the writer; by default `write_by_template`.

    Raises:
        ValueError: if the number of panels is not 2 to 16, the sentence contradicts it, or the writer has no answer.
    """
    if not text.strip():
        raise ValueError("the sentence is empty; say what the images show")
    request = read_request(text) or SetRequest(text, None, content=text)
    count = count or request.count or DEFAULT_COUNT
    if not 2 <= count <= MAX_COUNT:
        raise ValueError(f"{text[:60]!r} asks for {count} images; a set has 2 to {MAX_COUNT} panels")
    return (writer or write_by_template)(request, count)


# --- reading a request -----------------------------------------------------------------------------------------

COUNT = rf"(?P<count>\d{{1,3}}|{'|'.join(NUMBERS[1:])})"
VERB = (
    r"(?:(?:please|can|could|would|will|you|i|i['’]d|we|let['’]s|like|love|want|need|to|see|have|get|generate|create|make|"
    r"draw|paint|design|produce|show|render|illustrate|give|me|us)[\s,]+){0,9}"
)
"""`Could you please draw me`, `I'd like to have`."""
SEVERAL = r"(?:multiple|several|various|different|many|some|a\s+few)"
COLLECTION = r"(?:an?\s+)?(?:[\w-]+\s+){0,2}(?:set|series|sequence|collection|sheet|storyboard|strip|comic)\s+of\s+"
SUBJECT = r"(?-i:[a-z]+[^\Wsu]s)\s+\w+ing\b"
"""A plural that does something: `four cats playing cards` is one image."""
GAP = rf"(?P<adjectives>(?:(?!(?:of|in|on|at|with|for|and|the|an?)\b|{SUBJECT})[\w'’-]+\s+){{0,4}}?)"
VIEW = "image|picture|pic|panel|photo|photograph|shot|scene|frame|still|view|variation|version"
GENERAL = rf"{VIEW}|stage|step|phase|part"
"""Nouns that do not describe a panel: "four images of a fox" shows foxes, "four menus of a café" shows menus."""
PICTURE = rf"{VIEW}|drawing|illustration|painting|sketch|portrait|poster|mockup|logo|icon|sticker|render|banner"
UNIT = rf"(?P<unit>{GENERAL}|{PICTURE}|page|card|sign|display|menu|slide|design|cover|label)"
AMOUNT = rf"(?:an?\s+)?(?P<amount>{'|'.join(AMOUNTS)})(?:\s+of)?"
LEADING = re.compile(
    rf"\s{{0,9}}{VERB}(?:{COLLECTION})?(?:the\s+)?(?:{COUNT}|{SEVERAL}|{AMOUNT})\s+{GAP}{UNIT}(?:e?s)\b", re.I
)
"""`Generate four café menu displays`, `a series of 3 photos`, `several images`, `a pair of sketches`."""
COUNTED = re.compile(
    rf"\s{{0,9}}{VERB}(?:{COLLECTION})?(?:the\s+)?{COUNT}\s+{GAP}(?P<unit>[a-z]\w{{1,30}}?)(?:e?s)\b", re.I
)
"""`Three chalkboards …`: any plural, which asks for a set if the text lists as many."""
PLURAL = re.compile(rf"\s{{0,9}}{VERB}(?:{COLLECTION})?(?P<unit>image|picture|panel|photo)s\b", re.I)
"""`Images of …`, a plural without a number."""
WITHIN = re.compile(
    rf"\b(?:in|into|as|over|across)\s+{COUNT}\s+(?:[\w-]+\s+)?"
    r"(?P<unit>image|picture|panel|scene|stage|step|phase|frame)s\b",
    re.I,
)
"""`A dentist in four scenes`."""
HYPHENED = re.compile(rf"\b{COUNT}[- ](?P<unit>step|stage|panel|part|phase|frame|image|scene|picture)\b", re.I)
"""`a 3-step guide`, `a four-panel comic`."""
OF_THE_SET = re.compile(
    r"\b(?:coherent|consistent|matching|similar|related|different|distinct|separate|individual)\s*", re.I
)
"""Adjectives that describe the set and not a panel."""
MENTION = re.compile(
    rf"\b(?:(?:{COUNT}|{SEVERAL})\s+)?(?:[\w'’-]{{1,40}}\s)?(?:{PICTURE})e?s\b|"
    r"\b(?:triptych|diptych|storyboard|comic strip|character sheet|collage|before and after|\d\s?[x×]\s?\d)\b|"
    rf"\b(?:set|series|sequence|pair) of\b|\b(?:in|at|from)\s+(?:{SEVERAL}|(?!one\b)(?:\d+|{'|'.join(NUMBERS[1:])}))\s+"
    r"(?:[\w-]+\s+)?(?:pose|situation|setting|place|outfit|expression|angle|age|season|moment)s\b",
    re.I,
)
"""`… with four pictures`, `a storyboard`, `in four poses`: perhaps several images, perhaps one that shows them."""


def read_request(text: str) -> SetRequest | None:
    """Read the number of images in a request; None for a single image, or if the text contains panel tags."""
    if panel_texts(text):
        return None
    leading = LEADING.match(text) or PLURAL.match(text)
    match = leading or HYPHENED.search(text) or WITHIN.search(text)
    if match is not None:
        return _request_of(text, match, leading=match is leading)
    # Any plural, if the text lists as many: "three chalkboards … featuring: 'Fresh Brew', …".
    match = COUNTED.match(text)
    request = match and _request_of(text, match, leading=True)
    if request and len(_items(request.content, request.count or 0, marks=FIRM_MARK)[1]) == request.count:
        return request
    return None


def _request_of(text: str, match: re.Match[str], *, leading: bool) -> SetRequest | None:
    groups = match.groupdict()
    count = (groups.get("count") or groups.get("amount") or "").lower()
    if count in ("one", "1"):
        return None
    number = None
    if count.isdigit():
        number = int(count)
    elif count:
        number = AMOUNTS.get(count) or NUMBERS.index(count)

    # The content follows the count, or surrounds it ("a dentist in four scenes").
    content = text[match.end() :]
    if match.re is WITHIN:
        before = re.sub(rf"\s*{VERB}", "", text[: match.start()], count=1, flags=re.I)
        content = before.rstrip() + content

    # Nouns that describe the panels belong to the content ("four menus of a café").
    unit = groups["unit"].lower()
    adjectives = OF_THE_SET.sub("", groups.get("adjectives") or "").strip()
    if leading and (adjectives or not re.fullmatch(GENERAL, unit)):
        content = " ".join(filter(None, [adjectives, unit, content.strip()]))
    return SetRequest(text, number, unit, content)


def single_image_note(text: str) -> str:
    """Point out that a text makes one image although it mentions several; empty if it mentions none, or is a set."""
    mention = MENTION.search(text)
    if mention is None or panel_texts(text) or read_request(text):
        return ""
    return (
        f"{mention[0].strip()!r} may ask for several images, and the text makes one; for a set, begin with their "
        "number (four images of a fox: it runs, it sleeps, …), or describe each panel"
    )


# --- the template ----------------------------------------------------------------------------------------------

OPENING = re.compile(
    r"[^\w:]{0,9}(?:(?:set|series|sequence|collection|comic|strip)\s+(?=of|about))?"
    r"(?:(?:of|depicting|showing|portraying|featuring|presenting|illustrating|about|in which|that show)\s+)?",
    re.I,
)
"""Words before the subject."""
LIST_MARK = re.compile(r"[:(—]|\b(?:showing|depicting|featuring|including|such as|namely)\b", re.I)
"""Opens a list."""
FIRM_MARK = re.compile(r"[:—]|\b(?:featuring|namely)\b", re.I)
"""Opens a list, and never a description."""
LABEL = re.compile(r"reading|saying|labelled|labeled|titled", re.I)
LIST_WORD = re.compile(rf"\b(?:{LABEL.pattern}|featuring|showing|including|with|such as|namely)$", re.I)
"""The last word before quotations."""
COMMA = re.compile(r"[,;]\s*(?:and\s)?")
COMMA_OR_AND = re.compile(r"[,;]\s*(?:and\s)?|\sand\s")
VAGUE = re.compile(
    rf",?\s(?:(?P<where>in|with|from|at|for)\s+(?:{SEVERAL}|(?!one\b){COUNT})\s(?P<various>[^,;.]{{1,60}})|"
    r"each\s.{1,80})[.!?]?$",
    re.I,
)
"""`in various medical scenarios`, `each image …`: said of the set, and not of one panel."""
PROGRESS = re.compile(r"\b(?:progress\w*|stages?|steps?|phases?|growth|evolution)\b", re.I)
ACTION = re.compile(r"\s(?=\w+ing\b)")
VIEWS = ("seen from the front", "seen from the side", "in a close-up", "in a wide view")
MOMENTS = ("", ", a moment later", ", in other surroundings", ", at another time of day")
VARIETIES = {
    "scenario scene situation activity task moment event": (
        "preparing for it", "in the midst of it", "explaining it to somebody", "when it is done",
    ),
    "setting place environment location surrounding landscape": (
        "indoors", "outdoors", "in a crowded place", "in a quiet corner",
    ),
    "pose posture": ("standing", "sitting", "walking", "looking back over a shoulder"),
    "expression emotion mood": ("smiling", "surprised", "thoughtful", "laughing"),
    "season": ("in spring", "in summer", "in autumn", "in winter"),
    "time hour": ("in the morning", "at noon", "at sunset", "at night"),
}  # fmt: skip
"""Nouns of what varies → how panels differ in it: `in various medical scenarios`, `in different poses`."""
EDGES = " ,;:.?!(—"


def write_by_template(request: SetRequest, count: int) -> PanelDraft:
    """Write panels from the sentence alone; without a list they differ by stage, by what varies, or by view."""
    # The subject and the listed items.
    subject, items = _items(request.content, request.count or count)
    if items and request.count is None:
        count = len(items)
    if items and len(items) != count:
        raise ValueError(
            f"{request.text[:60]!r} lists {len(items)} images, and {count} are asked for; let text and layout agree"
        )

    # Panels by stage or view if the sentence lists none.
    theme = subject.strip(EDGES)
    vague = VAGUE.search(theme)
    shown = VAGUE.sub("", theme)
    progress = PROGRESS.search(request.text) is not None
    note = ""
    if not items:
        difference, ways = _variety(vague)
        items = []
        for number in range(count):
            items.append(ways[number % len(ways)] + MOMENTS[number // len(ways)])
        if progress:
            difference = "stage"
            noun = request.unit if request.unit in {"step", "phase"} else "stage"
            states = ["just begun", *["further along"] * (count - 2), "finished"]
            items = [f"{noun} {number} of {count}, {state}" for number, state in enumerate(states, 1)]
        note = (
            f"The text does not list what each panel shows, so panels differ by {difference} "
            "alone; list it (four images of a fox: it runs, it sleeps, …), edit the panels, or name a language model"
        )
    panels = tuple(items)
    if shown:
        # A generator of separate images reads each panel's text alone, so the subject is in every one.
        panels = tuple(f"{shown}, {item}" for item in items)

    # Criteria for the judge.
    criteria = {"Style": {"Style": "All images share one style, palette and light."}}
    if shown:
        criteria["Identity"] = {"Subject": "The same subject appears in all images."}
    if progress:
        criteria["Logic"] = {"Progress": "The later image continues the earlier one."}
    return PanelDraft(theme or ", ".join(items), panels, criteria, note)


def _variety(vague: re.Match[str] | None) -> tuple[str, tuple[str, ...]]:
    """Choose how panels without a list differ: by the noun that the sentence varies, else by view."""
    various = (vague["various"] or "").strip() if vague else ""
    # "medical scenarios" → "scenario", of which "medical" stays.
    *adjectives, plural = various.split() or [""]
    for nouns, ways in VARIETIES.items():
        for noun in nouns.split():
            if plural.lower() in (f"{noun}s", f"{noun[:-1]}ies"):
                if not adjectives:
                    return noun, ways
                kind = " ".join([*adjectives, noun])
                article = "an" if kind[0] in "aeiou" else "a"
                return noun, tuple(f"in {article} {kind}, {way}" for way in ways)
    return "view", VIEWS


def _items(content: str, count: int, *, marks: re.Pattern[str] | None = None) -> tuple[str, list[str]]:
    """Split a request's content into its subject and the listed or quoted panels; none without a list.

    Args:
        marks: marks that open a list; by default LIST_MARK, and a list of `count` items needs none.
    """
    content = OPENING.sub("", content, count=1)
    subject, items = _quotations(content)
    return (subject, items) if items else _listed(content, count, marks)


def _quotations(content: str) -> tuple[str, list[str]]:
    """Split off the quoted texts, if there are two or more, from the subject."""
    quotations = list(QUOTED.finditer(content))
    if len(quotations) < 2:
        return content, []
    subject = content[: quotations[0].start()].rstrip(EDGES)
    texts = ["".join(filter(None, quotation.groups())) for quotation in quotations]
    introduction = LIST_WORD.search(subject)
    word = introduction[0] if introduction else ""
    subject = subject.removesuffix(word)
    # Capitals and "reading" announce words written in the image; other quotations describe a panel.
    if LABEL.fullmatch(word) or all(text[0].isupper() for text in texts):
        return subject, [f"{word or 'with'} '{text}'" for text in texts]
    return subject, texts


def _listed(content: str, count: int, marks: re.Pattern[str] | None) -> tuple[str, list[str]]:
    """Split off a list of `count` items from the subject; no items if there is no such list."""
    # A list behind a mark. Only the last five marks: each covers the rest of the text, so colons would cost minutes.
    for mark in reversed(list((marks or LIST_MARK).finditer(content))[-5:]):
        listed = content[mark.end() :]
        items = _split(COMMA, listed)
        if len(items) != count:
            items = _split(COMMA_OR_AND, listed)
        if len(items) == count or (mark[0] == ":" and len(items) > 1):
            return content[: mark.start()], items
    if marks:
        return content, []

    # A list without a mark.
    items = _split(COMMA_OR_AND, content)
    # "before and during a storm" is no list.
    if "," in content and len(items) == count + 1:
        return items[0], items[1:]
    if "," not in content or len(items) != count:
        return content, []
    # "the same dentist reading an X-ray, cleaning teeth": the subject precedes the first action.
    subject, *action = ACTION.split(items[0], maxsplit=1)
    return (subject, [*action, *items[1:]]) if action else ("", items)


def _split(separator: re.Pattern[str], text: str) -> list[str]:
    items = []
    for item in separator.split(text.strip(" .)")):
        if item.strip(EDGES):
            items.append(item.strip(EDGES))
    return items
